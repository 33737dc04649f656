#include "server/store/load_job.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/status_macros.h"

namespace ballast {
namespace {

using kernels::PlaneKind;

size_t CountOf(const std::vector<bool>& chunks) {
  return static_cast<size_t>(std::count(chunks.begin(), chunks.end(), true));
}

std::string Share(const std::vector<bool>& chunks) {
  return absl::StrCat(CountOf(chunks), " of ", chunks.size(), " chunks");
}

}  // namespace

LoadJob::LoadJob(const RunSpec* spec, ParameterStore* store, LoadNeeds* needs)
    : spec_(spec), store_(store), needs_(needs) {
  for (auto& of_kind : held_) {
    for (const TensorSpec& t : spec->tensors) of_kind.emplace_back(ChunkCount(*spec, t));
  }
  counted_.resize(spec->tensors.size());
}

LoadJob::~LoadJob() { Abandon(absl::AbortedError("this LoadState is over")); }

void LoadJob::Load(std::vector<LoadChunk> chunks, Done done) {
  done_ = std::move(done);
  ++load_;
  left_ = chunks.size() + 1;
  for (LoadChunk& chunk : chunks) {
    if (absl::Status s = LoadOne(std::move(chunk)); !s.ok()) return Abandon(std::move(s));
  }
  OnOneLess();
}

absl::Status LoadJob::LoadOne(LoadChunk chunk) {
  if (chunk.updates) {
    counted_[chunk.tensor] = needs_->state[chunk.tensor] = true;
    store_->SetUpdates(chunk.tensor, *chunk.updates);
    OnOneLess();
    return absl::OkStatus();
  }
  held_[Index(chunk.kind)][chunk.tensor][chunk.chunk] = true;
  const TensorSpec& t = spec_->tensors[chunk.tensor];
  const TensorRange range{chunk.tensor, ChunkBegin(*spec_, chunk.chunk), ChunkEnd(*spec_, t, chunk.chunk)};
  if (chunk.kind != PlaneKind::kWeights) return LoadState(range, chunk);
  needs_->weights[chunk.tensor] = true;
  LoadWeights(range, std::move(chunk));
  return absl::OkStatus();
}

void LoadJob::LoadWeights(TensorRange range, LoadChunk chunk) {
  auto owned = std::make_unique<std::string>(std::move(chunk.data));
  const auto* in = reinterpret_cast<const std::byte*>(owned->data());
  store_->Load(
      range, chunk.format, in,
      [self = weak_from_this(), owned = std::move(owned), load = load_, tensor = chunk.tensor](const TaskResult& r) {
        if (const auto job = self.lock()) job->OnLoaded(load, tensor, r.finite);
      });
}

absl::Status LoadJob::LoadState(TensorRange range, const LoadChunk& chunk) {
  auto done = [self = weak_from_this(), load = load_, tensor = chunk.tensor](const TaskResult&) {
    if (const auto job = self.lock()) job->OnLoaded(load, tensor, true);
  };
  RETURN_IF_ERROR(store_->LoadState(range, chunk.kind, chunk.format,
                                    reinterpret_cast<const std::byte*>(chunk.data.data()), std::move(done)));
  needs_->state[chunk.tensor] = true;
  return absl::OkStatus();
}

void LoadJob::OnLoaded(uint64_t load, uint32_t tensor, bool finite) {
  if (load != load_) return;  // it was abandoned
  if (finite) return OnOneLess();
  Abandon(absl::InvalidArgumentError(
      absl::StrCat("tensor '", spec_->tensors[tensor].name,
                   "' holds a NaN or an infinity; weights must be finite when they are loaded")));
}

void LoadJob::OnOneLess() {
  if (--left_ == 0 && done_) std::exchange(done_, nullptr)(absl::OkStatus());
}

void LoadJob::Abandon(absl::Status why) {
  if (done_) std::exchange(done_, nullptr)(std::move(why));
}

absl::Status LoadJob::Finish() const {
  for (uint32_t i = 0; i < spec_->tensors.size(); ++i) {
    const std::vector<bool>& weights = held_[Index(PlaneKind::kWeights)][i];
    if (needs_->weights[i] && CountOf(weights) < weights.size()) {
      return absl::InvalidArgumentError(absl::StrCat("tensor '", spec_->tensors[i].name, "': ", Share(weights),
                                                     " were sent; send every tensor whole"));
    }
    if (absl::Status s = CheckState(i); !s.ok()) return s;
  }
  return absl::OkStatus();
}

// A tensor's state must be complete, or absent.
absl::Status LoadJob::CheckState(uint32_t tensor) const {
  if (!needs_->state[tensor]) return absl::OkStatus();
  bool whole = counted_[tensor];
  std::string sent = absl::StrCat("updates", whole ? "" : " not");
  for (const auto& [kind, name] : {std::pair{PlaneKind::kMomentum, "momentum"}, {PlaneKind::kVariance, "variance"}}) {
    const std::vector<bool>& chunks = held_[Index(kind)][tensor];
    if (StateCodec(*spec_, tensor, kind) == nullptr) continue;
    whole = whole && CountOf(chunks) == chunks.size();
    absl::StrAppend(&sent, ", ", name, " ", Share(chunks));
  }
  if (whole) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("tensor '", spec_->tensors[tensor].name,
                                                 "' has state that was sent in part (", sent,
                                                 "); send its momentum, variance and updates in the same LoadState"));
}

}  // namespace ballast
