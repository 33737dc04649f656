#include "client/cpp/transport/fork_watch.h"

#include <grpc/grpc.h>
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"

#include "client/cpp/transport/steady.h"

namespace ballast {
namespace {

// gRPC ends on a thread of its own, some milliseconds after the last connection; on a busy machine it took more than a
// second, and it gives itself ten. Whoever else uses it in this process keeps it, and no later fork is held up for that.
constexpr absl::Duration kUntilGrpcEnds = absl::Seconds(12);

std::atomic<int> connections{0};
std::atomic<int64_t> closed_ns{0};  // when the last one was, by SteadyNow()
std::atomic<bool> at_fork{false};   // gRPC was in use when the fork under way began
std::atomic<bool> is_broken{false};

// Holds no lock of a connection's: gRPC's own are free between its calls.
void BeforeFork() {
  const absl::Time give_up = absl::FromUnixNanos(closed_ns) + kUntilGrpcEnds;
  while (connections == 0 && grpc_is_initialized() != 0 && SteadyNow() < give_up) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  at_fork = connections > 0 || grpc_is_initialized() != 0;
}

void InFork() {
  if (at_fork) is_broken = true;
}

void WatchForks() {
  static const int watched = pthread_atfork(BeforeFork, nullptr, InFork);
  static_cast<void>(watched);
}

}  // namespace

ForkWatch::ForkWatch() {
  WatchForks();
  ++connections;
}

ForkWatch::~ForkWatch() {
  closed_ns = absl::ToUnixNanos(SteadyNow());
  --connections;
}

absl::Status CheckNotForked() {
  if (!is_broken) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "this process is a fork of one that had connections to a daemon, or used gRPC otherwise, which does not work in "
      "a fork: connect in a process that is started anew (in Python multiprocessing.get_context('spawn')), or fork "
      "before the first connection is made, or when all are closed");
}

void KeepForGood(std::shared_ptr<const void> held) {
  static auto* const kept = new std::vector<std::shared_ptr<const void>>;
  kept->push_back(std::move(held));
}

}  // namespace ballast
