#include "client/cpp/transport/shm_transport.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/checksum.h"
#include "proto/retry_after.h"

#include "client/cpp/wire/tensor_table.h"

namespace ballast {
namespace {

constexpr int kMostUnrung = 16;
constexpr uint64_t kMostInPipe = 8 << 10;  // of a payload
// How often a sleeper looks whether the daemon is still there.
constexpr auto kGlance = std::chrono::milliseconds(100);
// StepResult names at most every tensor, scales are at most those of a chunk's elements.
constexpr uint32_t kMostBodyBytes = 64 << 20;

absl::Status FromFinishBody(const std::string& body) {
  uint32_t code = 0;
  if (body.size() < sizeof code) return absl::InternalError("the daemon ended the stream without a status");
  std::memcpy(&code, body.data(), sizeof code);
  return {static_cast<absl::StatusCode>(code), body.substr(sizeof code)};
}

template <class Hello>
absl::StatusOr<Hello> HelloWith(const std::string& token) {
  Hello hello;
  if (token.size() != hello.token.size()) return absl::InternalError("the session's token has another size");
  std::copy(token.begin(), token.end(), hello.token.begin());
  return hello;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ShmTransport>> ShmTransport::Open(const std::string& path, const std::string& token,
                                                                 double patience_s, const std::shared_ptr<Gpu>& gpu,
                                                                 std::string* why_host) {
  if (gpu != nullptr) {
    auto opened = OpenForGpu(path, token, patience_s, gpu, why_host);
    if (opened.ok() || RetryAfterMsOf(opened.status())) return opened;
    *why_host = std::string(opened.status().message());  // the daemon may be an earlier one, or out of the GPU's reach
  }
  const auto hello = HelloWith<ShmHello>(token);
  if (!hello.ok()) return hello.status();
  auto socket = ShmSocket::Connect(path);
  if (!socket.ok()) return socket.status();
  auto segment = socket->Ask(*hello, patience_s);
  if (!segment.ok()) return segment.status();
  return std::unique_ptr<ShmTransport>(new ShmTransport(*std::move(socket), *std::move(segment), {.gpu = gpu}));
}

absl::StatusOr<std::unique_ptr<ShmTransport>> ShmTransport::OpenForGpu(const std::string& path,
                                                                       const std::string& token, double patience_s,
                                                                       const std::shared_ptr<Gpu>& gpu,
                                                                       std::string* why_host) {
  const auto hello = HelloWith<ShmGpuHello>(token);
  if (!hello.ok()) return hello.status();
  auto socket = ShmSocket::Connect(path);
  if (!socket.ok()) return socket.status();
  auto answer = socket->AskForGpu(*hello, patience_s);
  if (!answer.ok()) return answer.status();
  OnGpu on_gpu{.gpu = gpu};
  if (answer->gpu_memory.fd() >= 0) {
    auto memory = gpu->Import(answer->gpu_memory.fd(), GpuSlotBytes(answer->segment->shape()));
    if (!memory.ok()) return memory.status();
    on_gpu.memory = *std::move(memory);
  }
  *why_host = answer->why_none;
  return std::unique_ptr<ShmTransport>(
      new ShmTransport(*std::move(socket), std::move(answer->segment), std::move(on_gpu)));
}

ShmTransport::ShmTransport(ShmSocket socket, std::shared_ptr<ShmSegment> segment, OnGpu on_gpu)
    : socket_(std::move(socket)),
      segment_(std::move(segment)),
      on_gpu_(std::move(on_gpu)),
      control_(segment_->control()),
      writer_(UpPipe(*segment_)),
      lender_(GradientSlots(*segment_, on_gpu_.data())),
      room_(&control_.trainer_bell),
      reader_(DownPipe(*segment_), kMostBodyBytes),
      borrower_(WeightSlots(*segment_, on_gpu_.data())),
      news_(&control_.trainer_bell),
      pulse_(&control_.trainer_beats, &control_.daemon_beats) {}

void ShmTransport::Start(const v1::TrainRequest& open) {
  v1::TrainRequest first = open;
  first.mutable_open()->set_takes_data_in_records(true);
  Send({.type = ShmRecord::kMessage}, first.SerializeAsString());
}

bool ShmTransport::Write(v1::TrainRequest* request, bool more) {
  if (request->has_gradient()) FillChecksum(request->mutable_gradient());
  body_.clear();
  request->AppendToString(&body_);
  return Send({.type = ShmRecord::kMessage}, body_, more);
}

// A small payload goes through the pipe, and so does one that finds no slot.
std::optional<GradientRoom> ShmTransport::Reserve(uint64_t bytes, bool keep) {
  if (bytes <= kMostInPipe || bytes > lender_.slot_bytes()) return std::nullopt;
  const auto slot = lender_.Take();
  if (!slot) return std::nullopt;
  lender_.Lend(*slot);
  if (keep) lender_.Keep(*slot);
  return GradientRoom{.data = lender_.at(*slot).data(), .slot = *slot};
}

absl::StatusOr<uint32_t> ShmTransport::Fill(const GradientRoom& room, absl::Span<const std::byte> payload) {
  const bool from_gpu = on_gpu_.gpu != nullptr && on_gpu_.gpu->Owns(payload.data());
  if (on_gpu_.memory == nullptr && !from_gpu) return CopyCrc32c(room.data, payload);
  if (auto s = on_gpu_.gpu->Copy(room.data, payload.data(), payload.size()); !s.ok()) return s;
  return on_gpu_.memory != nullptr ? 0 : Crc32c({room.data, payload.size()});
}

bool ShmTransport::WriteAt(const GradientRoom& room, uint64_t bytes, const v1::TrainRequest& request) {
  return Send({.type = ShmRecord::kMessage, .slot = room.slot, .payload_bytes = static_cast<uint32_t>(bytes)},
              request.SerializeAsString());
}

bool ShmTransport::Send(const ShmRecord& record, absl::string_view body, bool more) {
  writer_.Add(record, body);
  for (;;) {
    const auto done = writer_.Flush();
    const bool later = more && done.ok() && *done && ++unrung_ < kMostUnrung;
    if (!later) {
      unrung_ = 0;
      Ring(&control_.daemon_bell);
    }
    if (!done.ok() || over_) return false;
    if (*done) return true;
    control_.up_full.Raise();
    if (!room_.Await(kGlance, [this] { return writer_.HasRoom() || over_; }) && socket_.HungUp()) return false;
  }
}

bool ShmTransport::Read(v1::TrainResponse* response, absl::Span<const std::byte>* data) {
  GiveBack();
  ShmRecord record;
  if (!Next(&record)) return false;
  if (record.type == ShmRecord::kFinish) return End(FromFinishBody(reader_.body()));
  if (record.type != ShmRecord::kMessage || !response->ParseFromString(reader_.body())) {
    return End(absl::InternalError("the daemon wrote what is no TrainResponse"));
  }
  *data = BytesOf(response->weights().data());
  if (record.slot == ShmRecord::kNoSlot) return true;
  const auto bytes = borrower_.Borrow(record.slot, record.payload_bytes);
  if (!bytes.ok()) return End(absl::InternalError(bytes.status().message()));
  borrowed_ = record.slot;
  *data = *bytes;
  return true;
}

void ShmTransport::GiveBack() {
  if (!borrowed_) return;
  borrower_.GiveBack(*std::exchange(borrowed_, std::nullopt));
  if (control_.weights_out.TakeDown()) Ring(&control_.daemon_bell);
}

bool ShmTransport::Next(ShmRecord* record) {
  for (bool hung_up = false;;) {
    pulse_.Beat();  // with each record, too: the pipe may not be empty for long
    const auto next = reader_.Next(record);
    if (control_.down_full.TakeDown()) Ring(&control_.daemon_bell);
    if (!next.ok()) return End(absl::InternalError(next.status().message()));
    if (*next) return true;
    // Records that were written before the end are read first.
    if (hung_up) return End(absl::UnavailableError("the daemon closed the shared memory"));
    if (over_) return End(absl::CancelledError("the stream was cancelled"));
    if (pulse_.Lost()) return End(absl::UnavailableError("the daemon does not answer"));
    const auto stirred = [this] { return over_ || control_.let_go.raised != 0; };
    if (!news_.Await(kGlance, [&] { return reader_.HasMore() || stirred(); }) || stirred()) hung_up = socket_.HungUp();
  }
}

bool ShmTransport::End(absl::Status status) {
  if (!end_) end_ = std::move(status);
  over_ = true;
  socket_.Shutdown();
  Ring(&control_.trainer_bell);  // the writer
  return false;
}

void ShmTransport::Cancel() {
  over_ = true;
  socket_.Shutdown();
  Ring(&control_.trainer_bell);
}

}  // namespace ballast
