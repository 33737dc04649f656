#include "server/load_job.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {

LoadJob::LoadJob(const RunSpec* spec, ParameterStore* store) : spec_(spec), store_(store) {
  for (const TensorSpec& t : spec->tensors) held_.emplace_back(ChunkCount(*spec, t));
}

LoadJob::~LoadJob() { Abandon(absl::AbortedError("this LoadState is over")); }

void LoadJob::Load(LoadChunk chunk, Done done) {
  const TensorSpec& t = spec_->tensors[chunk.tensor];
  const TensorRange range{chunk.tensor, ChunkBegin(*spec_, chunk.chunk), ChunkEnd(*spec_, t, chunk.chunk)};
  held_[chunk.tensor][chunk.chunk] = true;
  done_ = std::move(done);
  auto owned = std::make_unique<std::string>(std::move(chunk.data));
  const auto* in = reinterpret_cast<const std::byte*>(owned->data());
  store_->Load(range, chunk.format, in,
               [self = weak_from_this(), owned = std::move(owned), tensor = chunk.tensor](const TaskResult& r) {
                 if (const auto job = self.lock()) job->OnLoaded(tensor, r.finite);
               });
}

void LoadJob::OnLoaded(uint32_t tensor, bool finite) {
  if (!done_) return;
  std::exchange(done_,
                nullptr)(finite ? absl::OkStatus()
                                : absl::InvalidArgumentError(absl::StrCat(
                                      "tensor '", spec_->tensors[tensor].name,
                                      "' holds a NaN or an infinity; weights must be finite when they are loaded")));
}

void LoadJob::Abandon(absl::Status why) {
  if (done_) std::exchange(done_, nullptr)(std::move(why));
}

absl::Status LoadJob::Finish() const {
  for (size_t i = 0; i < held_.size(); ++i) {
    const auto held = std::count(held_[i].begin(), held_[i].end(), true);
    if (static_cast<size_t>(held) == held_[i].size()) continue;
    return absl::InvalidArgumentError(absl::StrCat("tensor '", spec_->tensors[i].name, "': ", held, " of ",
                                                   held_[i].size(), " chunks were sent; send every tensor whole"));
  }
  return absl::OkStatus();
}

}  // namespace ballast
