#include "proto/nccl/nccl_link.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/nccl/nccl_functions.h"
#include "proto/nccl/nccl_loss.h"

namespace ballast {
namespace {

// Between two looks, where the last was so long ago: small transfers are waited for by looking often, long ones seldom.
using Clock = std::chrono::steady_clock;
constexpr Clock::duration kShortest = std::chrono::microseconds(5), kLongest = std::chrono::milliseconds(1);

}  // namespace

NcclLink::NcclLink(std::shared_ptr<const Nccl> nccl, std::shared_ptr<Gpu> gpu, Side side)
    : nccl_(std::move(nccl)), gpu_(std::move(gpu)), side_(side) {}

absl::StatusOr<std::unique_ptr<NcclLink>> NcclLink::Open(std::shared_ptr<const Nccl> nccl, std::shared_ptr<Gpu> gpu,
                                                         const std::string& id, Side side) {
  using Functions = Nccl::Functions;
  if (id.size() != Nccl::kIdBytes) {
    return absl::InvalidArgumentError(absl::StrCat("an id of NCCL's has ", Nccl::kIdBytes, " bytes, not ", id.size()));
  }
  std::unique_ptr<NcclLink> link(new NcclLink(std::move(nccl), std::move(gpu), side));
  auto stream = link->gpu_->NewStream();
  if (!stream.ok()) return stream.status();
  link->stream_ = *std::move(stream);
  Functions::Id same;
  std::copy(id.begin(), id.end(), same.bytes.begin());
  const Functions& f = *link->nccl_->functions_;
  const auto init = [&] {
    Functions::Config config;
    return f.Check(f.init.call(&link->communicator_, 2, same, static_cast<int>(side), &config), f.init.name);
  };
  if (auto s = link->gpu_->InContext(init); !s.ok()) return s;
  return link;
}

NcclLink::~NcclLink() {
  if (communicator_ == nullptr || !gpu_->CheckNotFork().ok()) return;
  const auto& f = *nccl_->functions_;
  gpu_->InContext([&] { return f.Check(f.abort.call(communicator_), f.abort.name); }, true).IgnoreError();
}

absl::StatusOr<bool> NcclLink::Settled() {
  if (auto s = gpu_->CheckNotFork(); !s.ok()) return s;
  const auto& f = *nccl_->functions_;
  int state = Nccl::Functions::kSuccess;
  if (auto s = f.Check(f.get_async_error.call(communicator_, &state), f.get_async_error.name); !s.ok()) return s;
  if (auto s = f.Check(state, "NCCL", communicator_); !s.ok()) return s;
  return state == Nccl::Functions::kSuccess;
}

absl::Status NcclLink::Await(absl::FunctionRef<absl::StatusOr<bool>()> there, double patience_s, const char* what) {
  const Clock::time_point start = Clock::now();
  for (Clock::duration pause = kShortest;; pause = std::min(kLongest, pause * 5 / 4)) {
    const absl::StatusOr<bool> is_there = there();
    if (!is_there.ok()) return is_there.status();
    if (*is_there) return absl::OkStatus();
    if (stopped_) return absl::CancelledError("the link was stopped");
    if (Clock::now() - start > std::chrono::duration<double>(patience_s)) {
      return absl::DeadlineExceededError(absl::StrCat("NCCL ", what, " in ", patience_s, " s"));
    }
    std::this_thread::sleep_for(pause);
  }
}

absl::Status NcclLink::AwaitReady(double patience_s) {
  return Await([this] { return Settled(); }, patience_s, "did not connect both ends");
}

absl::Status NcclLink::Begin(absl::Span<const Piece> pieces, double patience_s) {
  if (auto s = Await([this] { return Settled(); }, patience_s, "has not taken what was begun before"); !s.ok())
    return s;
  const auto& f = *nccl_->functions_;
  const int other = side_ == Side::kSends ? static_cast<int>(Side::kReceives) : static_cast<int>(Side::kSends);
  return gpu_->InContext([&] {
    absl::Status begun = f.Check(f.group_start.call(), f.group_start.name);
    if (!begun.ok()) return begun;
    for (const Piece& piece : pieces) {
      void* const stream = stream_->handle();
      begun.Update(
          side_ == Side::kSends
              ? f.Check(f.send.call(piece.at, piece.bytes, f.kBytes, other, communicator_, stream), f.send.name)
              : f.Check(f.receive.call(piece.at, piece.bytes, f.kBytes, other, communicator_, stream), f.receive.name));
    }
    begun.Update(f.Check(f.group_end.call(), f.group_end.name));
    return begun;
  });
}

absl::Status NcclLink::Move(absl::Span<const Piece> pieces) {
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  if (auto s = Begin(pieces, NcclPatienceS(bytes)); !s.ok()) return s;
  return AwaitDone(NcclPatienceS(bytes));
}

absl::StatusOr<bool> NcclLink::Done() {
  const absl::StatusOr<bool> settled = Settled();
  if (!settled.ok() || !*settled) return settled;
  return stream_->Done();
}

absl::Status NcclLink::AwaitDone(double patience_s) {
  return Await([this] { return Done(); }, patience_s, "moved no bytes");
}

}  // namespace ballast
