#include "server/device/worker_team.h"

#include <pthread.h>

#include <algorithm>

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
    wanted_ = static_cast<uint32_t>(std::min<uint64_t>(parts - 1, workers_.size()));
  }
  WorkOn();
  if (!shared) return;
  const auto done = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return working_ == 0; };
  absl::MutexLock lock(&mu_);
  wanted_ = 0;
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
  const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return wanted_ > 0 || stopping_; };
  while (true) {
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&ready));
      if (stopping_) return;
      --wanted_;
      ++working_;
    }
    WorkOn();
    absl::MutexLock lock(&mu_);
    wanted_ = 0;  // no part is left
    --working_;
  }
}

}  // namespace ballast
