#include "server/device/worker_team.h"

#include <pthread.h>

namespace ballast {

WorkerTeam::WorkerTeam(uint32_t threads, const char* name) {
  for (uint32_t i = 1; i < threads; ++i) workers_.emplace_back([this] { WorkerLoop(); });
  for (std::thread& worker : workers_) pthread_setname_np(worker.native_handle(), name);
}

WorkerTeam::~WorkerTeam() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  for (std::thread& worker : workers_) worker.join();
}

void WorkerTeam::Share(uint64_t parts, Work work) {
  work_ = &work;
  parts_ = parts;
  next_.store(0, std::memory_order_relaxed);
  const bool shared = parts > 1 && !workers_.empty();
  if (shared) {
    absl::MutexLock lock(&mu_);
    ++number_;
    open_ = true;
  }
  WorkOn();
  if (!shared) return;
  const auto done = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return working_ == 0; };
  absl::MutexLock lock(&mu_);
  open_ = false;  // no part is left
  mu_.Await(absl::Condition(&done));
}

void WorkerTeam::WorkOn() {
  while (true) {
    const uint64_t part = next_.fetch_add(1, std::memory_order_relaxed);
    if (part >= parts_) return;
    (*work_)(part);
  }
}

void WorkerTeam::WorkerLoop() {
  uint64_t seen = 0;
  while (true) {
    {
      const auto ready = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return number_ != seen || stopping_; };
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&ready));
      if (number_ == seen) return;
      seen = number_;
      if (!open_) continue;
      ++working_;
    }
    WorkOn();
    absl::MutexLock lock(&mu_);
    --working_;
  }
}

}  // namespace ballast
