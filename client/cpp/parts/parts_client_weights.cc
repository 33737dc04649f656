// Weights and state of a run on several daemons, up and down: each tensor goes to, or comes from, the one that has it.
#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/cpp/parts/for_all.h"
#include "client/cpp/parts/part_tags.h"
#include "client/cpp/parts/parts_client.h"

namespace ballast {

std::vector<Shards> PartsClient::SplitShards(const PartPlacement& placement, const Shards& shards) {
  std::vector<Shards> split(placement.parts());
  if (shards.empty()) return split;
  for (uint32_t part = 0; part < placement.parts(); ++part) {
    for (const uint32_t tensor : placement.numbers(part)) {
      split[part].push_back(tensor < shards.size() ? shards[tensor] : std::nullopt);
    }
  }
  return split;
}

absl::StatusOr<std::vector<uint64_t>> PartsClient::LoadWeights(absl::Span<const TensorView> tensors, bool replace,
                                                               const std::function<void(uint64_t)>& sent) {
  if (!attached_) return NotAttached("LoadWeights");
  std::vector<std::vector<TensorView>> views(parts());
  for (const TensorView& view : tensors) {
    const auto place = PlaceOf("LoadWeights", view.tensor);
    if (!place.ok()) return place.status();
    views[place->part].push_back(view);
    views[place->part].back().tensor = place->index;
  }
  absl::Mutex mu;
  std::vector<uint64_t> bytes(parts());
  auto loaded = ForAll(parts(), [&](uint32_t part) -> absl::StatusOr<std::vector<uint64_t>> {
    if (replace && views[part].empty()) return std::vector<uint64_t>(whole_.placement.numbers(part).size());
    return daemons_[part]->LoadWeights(views[part], replace, [&](uint64_t so_far) {
      absl::MutexLock lock(&mu);
      bytes[part] = so_far;
      if (sent) sent(std::accumulate(bytes.begin(), bytes.end(), uint64_t{0}));
    });
  });
  std::vector<uint64_t> digests(whole_.placement.tensors());
  for (uint32_t part = 0; part < parts(); ++part) {
    if (!loaded[part].ok()) return NamedBy(names_[part], loaded[part].status());
    for (size_t i = 0; i < loaded[part]->size(); ++i) digests[whole_.placement.numbers(part)[i]] = (*loaded[part])[i];
  }
  return digests;
}

absl::StatusOr<std::vector<PartsClient::Picked>> PartsClient::Pick(const PartPlacement& placement,
                                                                   absl::Span<const uint32_t> tensors,
                                                                   absl::Span<const uint64_t> digests,
                                                                   const Shards& shards) {
  if (!digests.empty() && digests.size() != tensors.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("Pull with ", digests.size(), " digests of ", tensors.size(), " tensors; wanted: one for each"));
  }
  std::vector<Picked> picked(placement.parts());
  const std::vector<Shards> split = SplitShards(placement, shards);
  for (uint32_t part = 0; part < placement.parts(); ++part) picked[part].shards = split[part];
  std::vector<uint32_t> all(tensors.begin(), tensors.end());
  if (all.empty()) {
    all.resize(placement.tensors());
    std::iota(all.begin(), all.end(), 0);
  }
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i] >= placement.tensors()) {
      return absl::InvalidArgumentError(
          absl::StrCat("Pull of tensor ", all[i], ", but the run has ", placement.tensors()));
    }
    const PartPlacement::Place& place = placement[all[i]];
    picked[place.part].tensors.push_back(place.index);
    if (!digests.empty()) picked[place.part].digests.push_back(digests[i]);
  }
  return picked;
}

absl::Status PartsClient::PullParts(const std::string& run_id, absl::Span<const uint32_t> tensors,
                                    absl::Span<const uint64_t> digests, const Shards& shards, const PullPart& pull) {
  PartPlacement placement;
  if (attached_ && run_id == whole_.run_id) {
    placement = whole_.placement;
  } else {
    const auto whole = Look(run_id);
    if (!whole.ok()) return whole.status();
    placement = whole->placement;
  }
  const auto picked = Pick(placement, tensors, digests, shards);
  if (!picked.ok()) return picked.status();
  absl::Mutex one_at_a_time;  // the caller's sink
  const auto pulled = ForAll(parts(), [&](uint32_t part) {
    if ((*picked)[part].tensors.empty()) return absl::OkStatus();
    return pull(part, (*picked)[part], placement.numbers(part), &one_at_a_time);
  });
  for (uint32_t part = 0; part < parts(); ++part) {
    if (!pulled[part].ok()) return NamedBy(names_[part], pulled[part]);
  }
  return absl::OkStatus();
}

absl::Status PartsClient::Pull(
    const std::string& run_id, absl::Span<const uint32_t> tensors,
    const std::function<absl::Status(uint32_t tensor, uint64_t offset_bytes, absl::Span<const std::byte> piece,
                                     uint64_t step)>& sink,
    uint64_t snapshot, absl::Span<const uint64_t> digests, const Shards& shards) {
  return PullParts(
      run_id, tensors, digests, shards,
      [&](uint32_t part, const Picked& picked, const std::vector<uint32_t>& numbers, absl::Mutex* mu) {
        const auto renamed = [&](uint32_t tensor, uint64_t offset, absl::Span<const std::byte> piece, uint64_t step) {
          absl::MutexLock lock(mu);
          return sink(numbers[tensor], offset, piece, step);
        };
        return daemons_[part]->Pull(run_id, picked.tensors, renamed, snapshot, picked.digests, picked.shards);
      });
}

namespace {

// The sink, for a daemon's pieces.
auto Renamed(const std::vector<uint32_t>& numbers, const std::function<absl::Status(const ServedPiece&)>& sink,
             absl::Mutex* mu) {
  return [&numbers, &sink, mu](const ServedPiece& piece) {
    ServedPiece of_run = piece;
    of_run.tensor = numbers[piece.tensor];
    absl::MutexLock lock(mu);
    return sink(of_run);
  };
}

}  // namespace

absl::Status PartsClient::PullServed(const std::string& run_id, absl::Span<const uint32_t> tensors,
                                     const std::function<absl::Status(const ServedPiece&)>& sink, uint64_t snapshot,
                                     absl::Span<const uint64_t> digests, const Shards& shards) {
  return PullParts(run_id, tensors, digests, shards,
                   [&](uint32_t part, const Picked& picked, const std::vector<uint32_t>& numbers, absl::Mutex* mu) {
                     return daemons_[part]->PullServed(run_id, picked.tensors, Renamed(numbers, sink, mu), snapshot,
                                                       picked.digests, picked.shards);
                   });
}

absl::Status PartsClient::PullState(const std::string& run_id, absl::Span<const uint32_t> tensors,
                                    absl::Span<const std::string> slots,
                                    const std::function<absl::Status(const ServedPiece&)>& sink, uint64_t snapshot,
                                    const Shards& shards, std::optional<double> average) {
  return PullParts(run_id, tensors, {}, shards,
                   [&](uint32_t part, const Picked& picked, const std::vector<uint32_t>& numbers, absl::Mutex* mu) {
                     return daemons_[part]->PullState(run_id, picked.tensors, slots, Renamed(numbers, sink, mu),
                                                      snapshot, picked.shards, average);
                   });
}

absl::Status PartsClient::PullVersion(const v1::PullRequest& request,
                                      const std::function<absl::Status(const ServedPiece&)>& sink) {
  if (!request.version().has_tag()) {
    return absl::InvalidArgumentError("PullVersion of a run on several daemons wants a version by its name");
  }
  const auto lists = VersionsOfParts(request.run_id());
  if (!lists.ok()) return lists.status();
  const auto ids = FindTag(*lists, names_, request.version().tag());
  if (!ids.ok()) return ids.status();
  const std::vector<uint32_t> tensors(request.tensors().begin(), request.tensors().end());
  const std::vector<uint64_t> digests(request.digests().begin(), request.digests().end());
  return PullParts(request.run_id(), tensors, digests, {},
                   [&](uint32_t part, const Picked& picked, const std::vector<uint32_t>& numbers, absl::Mutex* mu) {
                     v1::PullRequest own;
                     own.set_run_id(request.run_id());
                     *own.mutable_version()->mutable_id() = (*ids)[part];
                     own.mutable_tensors()->Add(picked.tensors.begin(), picked.tensors.end());
                     own.mutable_digests()->Add(picked.digests.begin(), picked.digests.end());
                     return daemons_[part]->PullVersion(own, Renamed(numbers, sink, mu));
                   });
}

absl::StatusOr<PartPlacement::Place> PartsClient::PlaceOf(const char* call, uint32_t tensor) const {
  if (!attached_) return NotAttached(call);
  if (tensor < whole_.placement.tensors()) return whole_.placement[tensor];
  return absl::InvalidArgumentError(
      absl::StrCat(call, " of tensor ", tensor, ", but the run has ", whole_.placement.tensors()));
}

absl::Status PartsClient::BindWeights(uint32_t tensor, void* destination, uint64_t bytes) {
  const auto place = PlaceOf("BindWeights", tensor);
  return place.ok() ? daemons_[place->part]->BindWeights(place->index, destination, bytes) : place.status();
}

absl::Status PartsClient::BindServed(uint32_t tensor, void* codes, uint64_t bytes, absl::Span<float> scales) {
  const auto place = PlaceOf("BindServed", tensor);
  return place.ok() ? daemons_[place->part]->BindServed(place->index, codes, bytes, scales) : place.status();
}

}  // namespace ballast
