#include "server/load_job.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

using kernels::Kind;

size_t Held(const std::vector<bool>& chunks) {
  return static_cast<size_t>(std::count(chunks.begin(), chunks.end(), true));
}

std::string Share(const std::vector<bool>& chunks) {
  return absl::StrCat(Held(chunks), " of ", chunks.size(), " chunks");
}

}  // namespace

LoadJob::LoadJob(const RunSpec* spec, ParameterStore* store) : spec_(spec), store_(store) {
  for (auto& of_kind : held_) {
    for (const TensorSpec& t : spec->tensors) of_kind.emplace_back(ChunkCount(*spec, t));
  }
  counted_.resize(spec->tensors.size());
}

LoadJob::~LoadJob() { Abandon(absl::AbortedError("this LoadState is over")); }

void LoadJob::Load(LoadChunk chunk, Done done) {
  done_ = std::move(done);
  if (chunk.updates) {
    counted_[chunk.tensor] = true;
    store_->SetUpdates(chunk.tensor, *chunk.updates);
    return std::exchange(done_, nullptr)(absl::OkStatus());
  }
  held_[Index(chunk.kind)][chunk.tensor][chunk.chunk] = true;
  const TensorSpec& t = spec_->tensors[chunk.tensor];
  const TensorRange range{chunk.tensor, ChunkBegin(*spec_, chunk.chunk), ChunkEnd(*spec_, t, chunk.chunk)};
  chunk.kind == Kind::kWeights ? LoadWeights(range, std::move(chunk)) : LoadState(range, chunk);
}

void LoadJob::LoadWeights(TensorRange range, LoadChunk chunk) {
  auto owned = std::make_unique<std::string>(std::move(chunk.data));
  const auto* in = reinterpret_cast<const std::byte*>(owned->data());
  store_->Load(range, chunk.format, in,
               [self = weak_from_this(), owned = std::move(owned), tensor = chunk.tensor](const TaskResult& r) {
                 if (const auto job = self.lock()) job->OnLoaded(tensor, r.finite);
               });
}

void LoadJob::LoadState(TensorRange range, const LoadChunk& chunk) {
  const absl::Status s =
      store_->LoadState(range, chunk.kind, chunk.format, reinterpret_cast<const std::byte*>(chunk.data.data()),
                        [self = weak_from_this(), tensor = chunk.tensor](const TaskResult&) {
                          if (const auto job = self.lock()) job->OnLoaded(tensor, true);
                        });
  if (!s.ok()) std::exchange(done_, nullptr)(s);
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
  for (uint32_t i = 0; i < spec_->tensors.size(); ++i) {
    const std::vector<bool>& weights = held_[Index(Kind::kWeights)][i];
    if (Held(weights) < weights.size()) {
      return absl::InvalidArgumentError(absl::StrCat("tensor '", spec_->tensors[i].name, "': ", Share(weights),
                                                     " were sent; send every tensor whole"));
    }
    if (absl::Status s = CheckState(i); !s.ok()) return s;
  }
  return absl::OkStatus();
}

// All of it or none; none only where no earlier upload brought some.
absl::Status LoadJob::CheckState(uint32_t tensor) const {
  if (!store_->state_loaded(tensor)) return absl::OkStatus();
  bool whole = counted_[tensor];
  std::string sent = absl::StrCat("updates", whole ? "" : " not");
  for (const auto& [kind, name] : {std::pair{Kind::kMomentum, "momentum"}, {Kind::kVariance, "variance"}}) {
    const std::vector<bool>& chunks = held_[Index(kind)][tensor];
    if (StateCodec(*spec_, tensor, kind) == nullptr) continue;
    whole = whole && Held(chunks) == chunks.size();
    absl::StrAppend(&sent, ", ", name, " ", Share(chunks));
  }
  if (whole) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("tensor '", spec_->tensors[tensor].name,
                                                 "' has state that was sent in part (", sent,
                                                 "); send its momentum, variance and updates in the same LoadState"));
}

}  // namespace ballast
