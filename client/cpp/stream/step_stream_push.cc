// How StepStream takes a gradient in: a copy, in portions that leave while the next is made.

#include <algorithm>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/cpp/stream/step_stream.h"

namespace ballast {
namespace {

// Chunks of a gradient that are copied between two looks at the step.
constexpr uint64_t kCutTogether = 4;

}  // namespace

absl::Status StepStream::Push(uint32_t tensor, absl::Span<const std::byte> gradient) {
  if (auto s = tensors_.CheckIndex(tensor); !s.ok()) return s;
  const WireTensor& wire = tensors_[tensor];
  if (!wire.shard.contributes) {
    return absl::InvalidArgumentError(absl::StrCat("Push of ", tensors_.Name(tensor), ": rank ", options_.rank,
                                                   " holds elements [", wire.shard.begin, ", ", wire.shard.end,
                                                   ") of it and contributes nothing, as AttachOptions.shards ",
                                                   "says; it counts as absent here: leave the call out"));
  }
  if (gradient.size() != wire.gradient_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("gradient of ", tensors_.Name(tensor), ": got ", gradient.size(),
                                                   " bytes, wanted ", wire.gradient_bytes(), " (", wire.held_elements(),
                                                   " x ", wire.gradient, ")"));
  }
  {
    absl::MutexLock lock(&mu_);
    if (!status_.ok()) return status_;
    if (!step_) {
      return absl::FailedPreconditionError(absl::StrCat("Push of ", tensors_.Name(tensor), " before BeginStep"));
    }
    if (auto s = step_->MayPush(tensor); !s.ok()) return s;
  }
  uint64_t first = wire.first_chunk;
  try {
    do {  // the writer sends what is there, while the next is copied
      const uint64_t last = std::min(wire.end_chunk, first + kCutTogether);
      std::vector<std::string> chunks = CutIntoChunks(tensors_, tensor, first, last, gradient, &memory_);
      absl::MutexLock lock(&mu_);
      if (!status_.ok()) return status_;
      step_->Push(tensor, std::move(chunks));
      first = last;
    } while (first < wire.end_chunk);
  } catch (const std::bad_alloc&) {
    const absl::Status none = absl::ResourceExhaustedError(absl::StrCat(
        "Push of ", tensors_.Name(tensor), ": there is no host memory for a copy of ", gradient.size(), " bytes"));
    if (first > wire.first_chunk) Fail(none);  // a part of it may have left
    return none;
  }
  return absl::OkStatus();
}

}  // namespace ballast
