// A trainer of the shared-memory transport that writes what it likes, and runs to do it in.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>

#include "proto/shm/bell.h"
#include "proto/shm/record.h"
#include "proto/shm/slots.h"
#include "proto/shm/socket.h"

#include "server/convert/convert.h"
#include "tests/eventually.h"
#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {

// A trainer that writes what it likes.
class RawTrainer {
 public:
  // gpu: the memory of slots that are on_gpu.
  RawTrainer(ShmSocket socket, std::shared_ptr<ShmSegment> mapped, std::byte* gpu = nullptr)
      : segment(std::move(mapped)),
        lender(GradientSlots(*segment, gpu)),
        borrower(WeightSlots(*segment, gpu)),
        socket_(std::move(socket)),
        writer_(UpPipe(*segment)),
        reader_(DownPipe(*segment), 1 << 20),
        waiter_(&segment->control().trainer_bell) {}

  void Beat() { ++segment->control().trainer_beats.value; }
  void Ring() { ballast::Ring(&segment->control().daemon_bell); }
  void SendBody(ShmRecord record, const std::string& body) {
    Beat();
    writer_.Add(record, body);
    for (;;) {
      const bool all = writer_.Flush().value();
      Ring();
      if (all) return;
      segment->control().up_full.Raise();
      ASSERT_TRUE(waiter_.Await(std::chrono::seconds(30), [this] { return writer_.HasRoom(); }));
    }
  }
  void Send(const v1::TrainRequest& request) { SendBody({.type = ShmRecord::kMessage}, request.SerializeAsString()); }
  void Open(const std::string& token) {
    v1::TrainRequest request;
    request.mutable_open()->set_session_token(token);
    Send(request);
  }
  void Begin(uint64_t step) {
    v1::TrainRequest request;
    request.mutable_step_begin()->set_step(step);
    Send(request);
  }
  void End() {
    v1::TrainRequest request;
    request.mutable_micro_end();
    Send(request);
    request.mutable_step_end();
    Send(request);
  }
  // Sends a gradient in a slot; returns the slot.
  uint32_t Chunk(v1::Gradient gradient) {
    const uint32_t slot = lender.Take().value();
    std::memcpy(lender.at(slot).data(), gradient.data().data(), gradient.data().size());
    lender.Lend(slot);
    const auto bytes = static_cast<uint32_t>(gradient.data().size());
    gradient.clear_data();
    v1::TrainRequest request;
    *request.mutable_gradient() = std::move(gradient);
    SendBody({.type = ShmRecord::kMessage, .slot = slot, .payload_bytes = bytes}, request.SerializeAsString());
    return slot;
  }

  // Waits for the next record. False: the daemon hung up.
  bool Next(ShmRecord* record) {
    for (bool gone = false;; gone = socket_.HungUp()) {
      if (reader_.Next(record).value()) return true;
      if (gone) return false;
      Beat();
      if (segment->control().down_full.TakeDown()) Ring();
      waiter_.Await(std::chrono::milliseconds(20), [this] { return reader_.HasMore(); });
    }
  }
  const std::string& body() const { return reader_.body(); }
  // Reads on to the stream's end, and says how it ended.
  absl::Status Finish() {
    for (ShmRecord record; Next(&record);) {
      if (record.type != ShmRecord::kFinish) continue;
      uint32_t code = 0;
      std::memcpy(&code, body().data(), sizeof code);
      return {static_cast<absl::StatusCode>(code), body().substr(sizeof code)};
    }
    return absl::UnavailableError("the daemon hung up");
  }
  // Reads until the step's result, giving every slot back.
  StepAnswer Step() {
    StepAnswer answer;
    ShmRecord record;
    while (!answer.result && Next(&record)) {
      v1::TrainResponse response;
      EXPECT_TRUE(response.ParseFromString(body()));
      if (response.has_step_result()) answer.result = response.step_result();
      if (!response.has_weights()) continue;
      EXPECT_NE(record.slot, ShmRecord::kNoSlot);
      const auto bytes = borrower.Borrow(record.slot, record.payload_bytes).value();
      response.mutable_weights()->set_data(bytes.data(), bytes.size());
      Take(response.weights(), &answer);
      GiveBack(record);
    }
    return answer;
  }
  void GiveBack(const ShmRecord& record) {
    borrower.GiveBack(record.slot);
    if (segment->control().weights_out.TakeDown()) Ring();
  }
  void HangUp() { socket_ = ShmSocket(); }

  const std::shared_ptr<ShmSegment> segment;
  ShmLender lender;
  ShmBorrower borrower;

 private:
  ShmSocket socket_;
  ShmRecordWriter writer_;
  ShmRecordReader reader_;
  ShmWaiter waiter_;
};

class ShmRpcTest : public RpcTest {
 protected:
  void SetUp() override { StartServer(); }

  static ShmHello Hello(const std::string& token) {
    ShmHello hello;
    token.copy(hello.token.data(), hello.token.size());
    return hello;
  }
  static absl::StatusOr<std::unique_ptr<RawTrainer>> Ask(const v1::AttachResponse& grant, const std::string& token) {
    auto socket = ShmSocket::Connect(grant.shm_socket());
    if (!socket.ok()) return socket.status();
    auto segment = socket->Ask(Hello(token), 10);
    if (!segment.ok()) return segment.status();
    return std::make_unique<RawTrainer>(*std::move(socket), *std::move(segment));
  }

  struct Raw {
    RunSpec spec;
    v1::AttachResponse grant;
    std::unique_ptr<RawTrainer> trainer;
    std::unique_ptr<Reference> reference;
  };
  // Starts a run, loads its weights and opens the stream.
  Raw StartRaw(v1::RunSpec wire_spec, uint32_t world = 1) {
    wire_spec.set_ranks(world);
    Raw raw;
    EXPECT_TRUE(CreateRun(wire_spec).ok());
    raw.spec = ToRunSpec(wire_spec, config_.limits).value();
    raw.grant = AttachFresh(raw.spec.run_id, false, 0, world);
    raw.reference = std::make_unique<Reference>(raw.spec);
    v1::LoadStateResponse loaded;
    EXPECT_TRUE(LoadAll(raw.spec, raw.grant.session_token(), &loaded).ok());
    for (uint32_t i = 0; i < raw.spec.tensors.size(); ++i) raw.reference->Load(i, Weights(raw.spec, i));
    auto trainer = Ask(raw.grant, raw.grant.session_token());
    EXPECT_TRUE(trainer.ok()) << trainer.status();
    raw.trainer = *std::move(trainer);
    raw.trainer->Open(raw.grant.session_token());
    return raw;
  }
  // checksums: of weights, as all have that are not on a GPU.
  void ExpectStep(Raw* raw, uint64_t step, bool checksums = true) {
    SendStep(raw, step);
    const StepAnswer answer = raw->trainer->Step();
    ASSERT_TRUE(answer.result);
    EXPECT_TRUE(answer.checksums_right || !checksums);
    for (uint32_t i = 0; i < raw->spec.tensors.size(); ++i) EXPECT_TRUE(Equal(answer, *raw->reference, i)) << i;
  }
  static void SendStep(Raw* raw, uint64_t step) {
    raw->trainer->Begin(step);
    for (uint32_t i = 0; i < raw->spec.tensors.size(); ++i) {
      const std::string gradient = Gradient(raw->spec, i, step);
      for (const v1::Gradient& chunk : Chunks(raw->spec, i, gradient)) {
        EXPECT_SOON(raw->trainer->lender.free(), ::testing::Gt(0u));
        raw->trainer->Chunk(chunk);
      }
      raw->reference->Update(i, step, gradient);
    }
    raw->trainer->End();
  }
};

}  // namespace ballast::testing
