#include "server/storage/disk_threads.h"

#include <utility>

namespace ballast {

DiskThreads::DiskThreads(int threads) {
  for (int t = 0; t < threads; ++t) threads_.emplace_back([this] { Loop(); });
}

DiskThreads::~DiskThreads() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

absl::Status DiskThreads::ForEach(size_t count, Task task) {
  if (count == 0) return absl::OkStatus();
  Batch batch{.task = task, .count = count};
  const auto all_done = [&batch] { return batch.done == batch.count; };
  absl::MutexLock lock(&mu_);
  batches_.push_back(&batch);
  mu_.Await(absl::Condition(&all_done));
  return batch.status;
}

void DiskThreads::Loop() {
  const DiskBuffer buffer;
  const auto has_work = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return stopping_ || !batches_.empty(); };
  mu_.Lock();
  for (mu_.Await(absl::Condition(&has_work)); !batches_.empty(); mu_.Await(absl::Condition(&has_work))) {
    Batch* const batch = batches_.front();
    const size_t index = batch->next++;
    if (batch->next == batch->count) batches_.pop_front();
    if (batch->status.ok()) {
      mu_.Unlock();
      absl::Status status = batch->task(index, buffer);
      mu_.Lock();
      batch->status.Update(std::move(status));
    }
    ++batch->done;  // whoever waits may end the batch now
  }
  mu_.Unlock();
}

}  // namespace ballast
