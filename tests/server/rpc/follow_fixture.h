// Readers that follow a run of a daemon in this process, by bare stubs.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "proto/changes.h"
#include "proto/checksum.h"

#include "ballast/v1/follow.grpc.pb.h"
#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {

// One Subscribe call, read as the test wants it.
class Reader {
 public:
  Reader(v1::FollowService::Stub* stub, const v1::SubscribeRequest& request)
      : call_(stub->Subscribe(&context_, request)) {}
  ~Reader() {
    context_.TryCancel();
    if (!finished_) Finish().IgnoreError();
  }

  // The next version, whole, over what came before; none: the call has ended.
  std::optional<v1::VersionBegin> Next() {
    std::optional<v1::VersionBegin> begin;
    while (std::optional<v1::VersionPart> part = Part()) {
      if (part->has_begin()) {
        begin = part->begin();
        EXPECT_TRUE(!begin->has_base() || begin->base().SerializeAsString() == have_);
      } else if (part->has_chunk()) {
        Take(part->chunk());
      } else {
        have_ = part->end().id().SerializeAsString();
        return begin;
      }
    }
    return std::nullopt;
  }
  // Versions until that of this step in this generation.
  bool AwaitStep(uint64_t step, uint64_t generation = 1) {
    while (const auto begin = Next()) {
      if (begin->id().step() == step && begin->id().generation() >= generation) return true;
    }
    return false;
  }
  struct Ended {
    grpc::Status status;
    void IgnoreError() const {}
  };
  Ended Finish() {
    v1::VersionPart part;
    while (call_->Read(&part)) continue;
    finished_ = true;
    return {call_->Finish()};
  }

  std::map<uint32_t, std::string> weights;                            // by tensor
  std::map<uint32_t, std::map<uint64_t, std::vector<float>>> scales;  // by tensor and chunk
  uint64_t changed_chunks = 0, whole_chunks = 0;

 private:
  std::optional<v1::VersionPart> Part() {
    while (batch_.empty()) {
      v1::VersionPart read;
      if (!call_->Read(&read)) return std::nullopt;
      if (read.batch().empty()) return read;
      batch_.assign(read.batch().begin(), read.batch().end());
    }
    v1::VersionPart part = std::move(batch_.front());
    batch_.pop_front();
    return part;
  }
  void Take(const v1::ChangedChunk& chunk) {
    std::string& codes = pieces_[chunk.tensor()][chunk.chunk()];
    const size_t width = WireBytes(kernels::FindWireFormat(chunk.format()));
    const bool all = chunk.position_coding() == v1::POSITION_CODING_ALL;
    if (all) codes.resize(chunk.values().size());
    ++(all ? whole_chunks : changed_chunks);
    const auto applied =
        ApplyChanges({static_cast<PositionCoding>(chunk.position_coding()),
                      static_cast<ValueCoding>(chunk.value_coding()), chunk.count(), chunk.positions(), chunk.values()},
                     width, absl::MakeSpan(reinterpret_cast<std::byte*>(codes.data()), codes.size()));
    EXPECT_TRUE(applied.ok()) << applied;
    EXPECT_EQ(Crc32c(Bytes(chunk.positions() + chunk.values())), chunk.crc32c());
    scales[chunk.tensor()][chunk.chunk()].assign(chunk.scales().begin(), chunk.scales().end());
    std::string& whole = weights[chunk.tensor()];
    whole.clear();
    for (const auto& [number, piece] : pieces_[chunk.tensor()]) whole += piece;
    if (chunk.last() && scales[chunk.tensor()][0].empty()) {
      EXPECT_EQ(WeightDigest(Bytes(whole)), chunk.digest());
    }
  }

  grpc::ClientContext context_;
  const std::unique_ptr<grpc::ClientReader<v1::VersionPart>> call_;
  std::deque<v1::VersionPart> batch_;
  std::map<uint32_t, std::map<uint64_t, std::string>> pieces_;
  std::string have_;
  bool finished_ = false;
};

class FollowRpcTest : public RpcTest {
 protected:
  void SetUp() override {
    StartServer();
    follow_ = v1::FollowService::NewStub(channel_);
  }
  static v1::RunSpec Followed(const std::string& serving = "") {
    v1::RunSpec spec = SmallSpec();
    spec.mutable_follow();
    if (!serving.empty()) spec.mutable_groups(0)->set_serving(serving);
    return spec;
  }
  static v1::SubscribeRequest OfRun(const std::string& run_id = "r1") {
    v1::SubscribeRequest request;
    request.set_run_id(run_id);
    return request;
  }
  static v1::SubscribeRequest OfAverage(double decay) {
    v1::SubscribeRequest request = OfRun();
    request.set_average(decay);
    return request;
  }
  void ExpectPulled(Reader& reader, std::optional<double> average = std::nullopt, const std::string& run_id = "r1") {
    v1::PullRequest request;
    request.set_run_id(run_id);
    if (average) request.set_average(*average);
    grpc::ClientContext context;
    const auto pull = trainer_->Pull(&context, request);
    StepAnswer answer;
    v1::Weights w;
    while (pull->Read(&w)) Take(w, &answer);
    ASSERT_TRUE(pull->Finish().ok());
    EXPECT_EQ(reader.weights, answer.weights);
    for (const auto& [tensor, scales] : answer.scales) {
      std::vector<float> of_chunks;
      for (const auto& [chunk, some] : reader.scales[tensor])
        of_chunks.insert(of_chunks.end(), some.begin(), some.end());
      EXPECT_EQ(of_chunks, scales) << tensor;
    }
  }
  grpc::Status Refusal(const v1::SubscribeRequest& request) { return Reader(follow_.get(), request).Finish().status; }

  std::unique_ptr<v1::FollowService::Stub> follow_;
};

}  // namespace ballast::testing
