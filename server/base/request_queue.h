// Requests whose work grows with what they say (a spec and its patterns, a run of many tensors), one after another on a
// thread of their own: gRPC's threads stay free for the streams of running trainers. What waits is bounded, in number
// and in bytes; who comes beyond is told when to ask again.
//
// Thread-safe. The queue ends before what its tasks use, and carries out what was posted first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

#include "server/base/strand.h"

namespace ballast {

class RequestQueue {
 public:
  // With those at work. Trainers of one run come all at once, 64 at most.
  static constexpr size_t kMostRequests = 256;
  static constexpr uint64_t kMostBytes = uint64_t{256} << 20;  // of their messages
  static constexpr int kRetryAfterMs = 500;

  // A request's place in the queue, which it has until it lets go: what is done of it elsewhere takes it along.
  using Place = std::shared_ptr<void>;
  using Task = absl::AnyInvocable<void(Place)>;

  // bytes: of its message. RESOURCE_EXHAUSTED, and the task is dropped: too much waits. One request is always taken.
  absl::Status Post(uint64_t bytes, Task task);

 private:
  void Leave(uint64_t bytes);

  absl::Mutex mu_;
  size_t requests_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
  Strand strand_{{.name = "requests"}};  // last: its thread uses the above
};

}  // namespace ballast
