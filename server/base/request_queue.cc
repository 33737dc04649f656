#include "server/base/request_queue.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/saturating.h"

namespace ballast {

absl::Status RequestQueue::Post(uint64_t bytes, Task task) {
  {
    absl::MutexLock lock(&mu_);
    if (requests_ == kMostRequests || (requests_ > 0 && Sum(bytes_, bytes) > kMostBytes)) {
      return absl::ResourceExhaustedError(absl::StrCat("the daemon is busy with ", requests_, " requests of ", bytes_,
                                                       " bytes, of at most ", kMostRequests, " and ", kMostBytes,
                                                       "; ask again in a moment"));
    }
    ++requests_;
    bytes_ += bytes;
  }
  Place place(nullptr, [this, bytes](void*) { Leave(bytes); });
  strand_.Post([task = std::move(task), place = std::move(place)]() mutable { task(std::move(place)); });
  return absl::OkStatus();
}

void RequestQueue::Leave(uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  --requests_;
  bytes_ -= bytes;
}

}  // namespace ballast
