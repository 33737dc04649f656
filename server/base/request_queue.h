// Carries out requests whose work grows with their size (a spec and its patterns, a run of many tensors), one after
// another on a thread of its own, so that gRPC's threads stay free for the streams of running trainers. The number and
// the bytes of waiting requests are bounded; a client whose request is refused is told when to ask again.
//
// Thread-safe. The destructor first carries out what was posted, so the queue must end before what its tasks use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

#include "server/base/strand.h"

namespace ballast {

class RequestQueue {
 public:
  // name: of its thread.
  explicit RequestQueue(const std::string& name = "requests") : strand_({.name = name}) {}

  // The request at work counts, too. The trainers of one run, at most 64, ask all at once.
  static constexpr size_t kMostRequests = 256;
  static constexpr uint64_t kMostBytes = uint64_t{256} << 20;  // of memory, that their messages take
  static constexpr int kRetryAfterMs = 500;

  // A request's place in the queue, kept until the last copy is gone: work that goes on elsewhere takes it along.
  using Place = std::shared_ptr<void>;
  using Task = absl::AnyInvocable<void(Place)>;

  // bytes: what the request's message takes of memory. RESOURCE_EXHAUSTED, and the task is dropped: too much waits. An empty
  // queue takes any request.
  absl::Status Post(uint64_t bytes, Task task);

 private:
  void Leave(uint64_t bytes);

  absl::Mutex mu_;
  size_t requests_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
  Strand strand_;  // last: its thread uses the above
};

}  // namespace ballast
