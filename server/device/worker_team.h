// Threads that share one piece of work: they take its parts by counter. The caller is one of them.
//
//   WorkerTeam team(4, "copier");
//   team.Share(parts, [&](uint64_t part) {...});   // returns when all parts are done
//
// One caller at a time. Share takes no memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"

namespace ballast {

class WorkerTeam {
 public:
  // threads: the caller counts, so that 1 has no thread of its own, and 0 is 1. name: of the threads, at most 15 letters.
  WorkerTeam(uint32_t threads, const char* name);
  ~WorkerTeam();
  WorkerTeam(const WorkerTeam&) = delete;

  uint32_t threads() const { return static_cast<uint32_t>(workers_.size()) + 1; }
  // All but the caller; for who places them on processors.
  std::vector<std::thread>& workers() { return workers_; }

  // Calls work(i) once for each i of [0, parts), in any order, several at a time. It wakes no more workers than there are parts
  // for, which costs some 10 us, and waits for those that have begun, and not for one that the system has not run by then.
  void Share(uint64_t parts, absl::FunctionRef<void(uint64_t part)> work);

 private:
  using Work = absl::FunctionRef<void(uint64_t part)>;
  void WorkerLoop();
  void WorkOn();

  // The work in hand: written by the caller before the workers are woken.
  const Work* work_ = nullptr;
  uint64_t parts_ = 0;
  std::atomic<uint64_t> next_ = 0;

  absl::Mutex mu_;
  uint32_t wanted_ ABSL_GUARDED_BY(mu_) = 0;   // workers that may still begin on the work in hand
  uint32_t working_ ABSL_GUARDED_BY(mu_) = 0;  // that have begun, and not ended
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;

  std::vector<std::thread> workers_;
};

}  // namespace ballast
