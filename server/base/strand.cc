#include "server/base/strand.h"

#include <pthread.h>

#include <chrono>
#include <utility>

#include "server/base/clock.h"
#include "server/base/start_thread.h"

namespace ballast {

Strand::Strand(Options options) : options_(std::move(options)), thread_(StartThread([this] { Loop(); })) {
  // The kernel's limit is 15 characters; a name that does not fit is cut.
  pthread_setname_np(thread_.native_handle(), options_.name.substr(0, 15).c_str());
}

Strand::~Strand() { Stop(); }

void Strand::Post(Task task) {
  if (!Take(&task)) task();
}

bool Strand::Take(Task* task) {
  const std::lock_guard lock(mu_);
  if (stopped_) return false;
  posted_.push_back(std::move(*task));
  if (posted_.size() == 1) ready_.notify_one();  // under the lock: then the task may end the strand
  return true;
}

void Strand::Stop() {
  {
    const std::lock_guard lock(mu_);
    stopping_ = true;
    ready_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

double Strand::busy_s() const {
  const double since = busy_since_s_.load(std::memory_order_relaxed);
  return since == 0 ? 0 : MonotonicSeconds() - since;
}

void Strand::Progress() {
  double since = busy_since_s_.load(std::memory_order_relaxed);
  if (since != 0) busy_since_s_.compare_exchange_strong(since, MonotonicSeconds(), std::memory_order_relaxed);
}

void Strand::RunAll(std::vector<Task>* batch) {
  for (Task& task : *batch) {
    busy_since_s_.store(CoarseSeconds(), std::memory_order_relaxed);
    task();
    task = nullptr;
  }
  if (options_.after && !batch->empty()) options_.after();
  batch->clear();
  busy_since_s_.store(0, std::memory_order_relaxed);
}

void Strand::Loop() {
  std::vector<Task> batch;
  double next_tick_s = MonotonicSeconds() + options_.tick_s;
  while (true) {
    {
      std::unique_lock lock(mu_);
      const auto ready = [this] { return !posted_.empty() || stopping_; };
      ready_.wait_for(lock, std::chrono::duration<double>(next_tick_s - MonotonicSeconds()), ready);
      std::swap(batch, posted_);
      if (batch.empty() && stopping_) {
        stopped_ = true;
        return;
      }
    }
    RunAll(&batch);
    if (const double now_s = MonotonicSeconds(); now_s >= next_tick_s) {
      if (options_.tick) options_.tick();
      next_tick_s = now_s + options_.tick_s;
    }
  }
}

}  // namespace ballast
