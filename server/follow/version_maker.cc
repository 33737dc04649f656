#include "server/follow/version_maker.h"

#include <cstring>
#include <utility>

#include "proto/checksum.h"

#include "server/plan/plan.h"

namespace ballast {
namespace {

// EncodeNext takes so many bytes of small tensors together.
constexpr uint64_t kEncodedTogether = uint64_t{1} << 20;

absl::Span<const std::byte> BytesOf(absl::string_view bytes) {
  return {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
}

// To the bit, whatever they are.
bool AreSame(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

}  // namespace

// What is encoded and compared of one version. The digesters are the comparing thread's, all else is the strand's.
struct VersionMaker::Build {
  std::shared_ptr<WeightVersion> version = std::make_shared<WeightVersion>();
  std::shared_ptr<VersionChange> change = std::make_shared<VersionChange>();
  std::shared_ptr<const WeightVersion> before;
  std::vector<bool> submitted;  // by tensor
  uint32_t next = 0;            // the first that may not be
  uint64_t chunks_left = 0;     // that are not in the version yet
  std::vector<std::unique_ptr<Item>> encoded;
  bool comparing = false;
  std::atomic<bool> abandoned = false;                     // what is not compared yet, need not be
  std::vector<std::unique_ptr<TensorDigester>> digesters;  // by tensor, from its first chunk until its last
  std::vector<std::vector<ChangedPiece>> changed;          // by tensor
};

VersionMaker::VersionMaker(Environment environment)
    : environment_(std::move(environment)),
      chunk_starts_(*environment_.chunk_starts),
      comparer_({.name = "versions"}) {}

void VersionMaker::Abandon() {
  if (build_ != nullptr) build_->abandoned = true;
  build_ = nullptr;
}

void VersionMaker::Begin(VersionId id, double closed_unix_s, std::shared_ptr<const WeightVersion> before) {
  const size_t tensors = environment_.spec->tensors.size();
  build_ = std::make_shared<Build>();
  WeightVersion& version = *build_->version;
  version = {.id = id, .number = ++made_, .closed_unix_s = closed_unix_s};
  version.pieces.resize(chunk_starts_.back());
  version.digests.resize(tensors);
  version.stored.resize(tensors);
  VersionChange& change = *build_->change;
  change.id = id;
  change.number = made_;
  change.closed_unix_s = closed_unix_s;
  if (before != nullptr) change.from = before->id;
  build_->before = std::move(before);
  build_->submitted.resize(tensors);
  build_->chunks_left = version.pieces.size();
  build_->digesters.resize(tensors);
  build_->changed.resize(tensors);
}

void VersionMaker::BeforeChange(uint32_t tensor) {
  if (build_ != nullptr && !build_->submitted[tensor]) Submit(tensor, nullptr);
}

bool VersionMaker::EncodeNext(std::function<void()> done) {
  if (build_ == nullptr || encoding_) return false;
  const RunSpec& spec = *environment_.spec;
  std::vector<uint32_t> together;
  uint64_t bytes = 0;
  for (uint32_t& next = build_->next; next < build_->submitted.size() && bytes < kEncodedTogether; ++next) {
    if (build_->submitted[next]) continue;
    together.push_back(next);
    bytes += ServingBytes(spec.tensors[next]);
  }
  if (together.empty()) return false;
  encoding_ = true;
  const auto left = std::make_shared<size_t>(together.size());
  const auto encoded = [self = weak_from_this(), left, done = std::move(done)] {
    if (--*left > 0) return;
    const auto maker = self.lock();
    if (maker == nullptr) return;
    maker->encoding_ = false;
    done();
  };
  for (const uint32_t tensor : together) Submit(tensor, encoded);
  return true;
}

// The tensor is as the version before has it. Its caller may be about to change it, and is not to wait for readers.
void VersionMaker::TakeOver(uint32_t tensor, const std::function<void()>& done) {
  const WeightVersion& before = *build_->before;
  WeightVersion& version = *build_->version;
  const uint64_t first = chunk_starts_[tensor], end = chunk_starts_[tensor + 1];
  for (uint64_t c = first; c < end; ++c) version.pieces[c] = before.pieces[c];
  version.digests[tensor] = before.digests[tensor];
  build_->chunks_left -= end - first;
  environment_.strand->Post([self = weak_from_this(), build = build_, done] {
    if (const auto maker = self.lock()) maker->FinishIfWhole(build);
    if (done) done();
  });
}

// `done`, unless it is empty, when all of the tensor is encoded, also where it need not be.
void VersionMaker::Submit(uint32_t tensor, const std::function<void()>& done) {
  const RunSpec& spec = *environment_.spec;
  const TensorSpec& t = spec.tensors[tensor];
  Build& build = *build_;
  build.submitted[tensor] = true;
  const uint64_t stored = build.version->stored[tensor] = environment_.store->version(tensor);
  if (build.before != nullptr && build.before->stored[tensor] == stored) {
    return TakeOver(tensor, done);
  }
  const uint64_t chunks = ChunkCount(spec, t);
  for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
    auto item = std::make_unique<Item>(Item{.tensor = tensor, .chunk = chunk});
    if (build.before != nullptr) item->before = build.before->pieces[chunk_starts_[tensor] + chunk];
    const uint64_t elements = ChunkEnd(spec, t, chunk) - ChunkBegin(spec, chunk);
    item->memory = std::make_unique_for_overwrite<std::byte[]>(elements * WireBytes(t.serving_format));
    WeightPiece* const to = &item->encoded;
    to->place = item->memory.get();
    const TensorRange range{tensor, ChunkBegin(spec, chunk), ChunkEnd(spec, t, chunk)};
    environment_.store->EncodeWeights(
        range, to,
        [self = weak_from_this(), of = build_, item = std::move(item), last = chunk + 1 == chunks,
         done](const TaskResult&) mutable {
          if (const auto maker = self.lock()) maker->OnEncoded(of, std::move(item));
          if (last && done) done();
        },
        /*image=*/nullptr, environment_.series);
  }
}

void VersionMaker::OnEncoded(const std::shared_ptr<Build>& build, std::unique_ptr<Item> item) {
  if (build != build_) return;
  build->encoded.push_back(std::move(item));
  if (!build->comparing) CompareMore(build);
}

// All that was encoded meanwhile, in its order: the chunks of a tensor come one after another.
void VersionMaker::CompareMore(const std::shared_ptr<Build>& build) {
  build->comparing = true;
  comparer_.Post([self = weak_from_this(), build = build, items = std::exchange(build->encoded, {}),
                  spec = environment_.spec, memory = environment_.memory, strand = environment_.strand]() mutable {
    for (const auto& item : items) {
      if (!build->abandoned) Compare(*spec, memory, build.get(), item.get());
    }
    // Nothing of it is held here any more when the strand goes on: its memory counts.
    strand->Post([self, build = std::move(build), items = std::move(items)]() mutable {
      if (const auto maker = self.lock()) maker->OnCompared(build, std::move(items));
    });
  });
}

// On the comparing thread.
void VersionMaker::Compare(const RunSpec& spec, const std::shared_ptr<FollowMemory>& memory, Build* build, Item* item) {
  const TensorSpec& t = spec.tensors[item->tensor];
  WeightPiece& encoded = item->encoded;
  std::unique_ptr<TensorDigester>& digester = build->digesters[item->tensor];
  if (item->chunk == 0) digester = std::make_unique<TensorDigester>(&t);
  digester->Add(encoded.encoded(), encoded.scales, ChunkBegin(spec, item->chunk));
  if (item->chunk + 1 == ChunkCount(spec, t)) {
    item->digest = digester->Digest();
    digester.reset();
  }
  FoundChanges found;
  if (item->before != nullptr) {
    found = FindChanges(item->before->codes(), encoded.encoded(), WireBytes(t.serving_format), encoded.bytes() / 2);
    if (found.changes && found.count == 0 && AreSame(item->before->scales, encoded.scales))
      return void(item->now = item->before);
  }
  const uint64_t size = encoded.encoded().size(), bytes = encoded.bytes() + kPieceOverhead;
  item->now = std::make_shared<const VersionPiece>(VersionPiece{.memory = std::move(item->memory),
                                                                .size = size,
                                                                .scales = encoded.scales,
                                                                .crc32c = encoded.crc32c,
                                                                .share = {memory, bytes}});
  if (item->before == nullptr) return;
  item->differing = found.count;
  ChangedPiece& changed = item->changed.emplace(ChangedPiece{.tensor = item->tensor, .chunk = item->chunk});
  if (!found.changes) return void(changed.whole = item->now);
  changed.changes = *std::move(found.changes);
  changed.scales = std::move(encoded.scales);
  changed.crc32c = ExtendCrc32c(Crc32c(BytesOf(changed.changes.positions)), BytesOf(changed.changes.values));
}

void VersionMaker::OnCompared(const std::shared_ptr<Build>& build, std::vector<std::unique_ptr<Item>> items) {
  if (build != build_) return;
  WeightVersion& version = *build->version;
  for (const auto& item : items) {
    version.pieces[chunk_starts_[item->tensor] + item->chunk] = item->now;
    std::vector<ChangedPiece>& changed = build->changed[item->tensor];
    if (item->changed) changed.push_back(*std::move(item->changed));
    build->change->elements += item->differing;
    --build->chunks_left;
    if (item->chunk + 1 < chunk_starts_[item->tensor + 1] - chunk_starts_[item->tensor]) continue;
    version.digests[item->tensor] = item->digest;
    if (changed.empty()) continue;
    changed.back().last = true;
    changed.back().digest = item->digest;
  }
  build->comparing = false;
  if (!build->encoded.empty()) return CompareMore(build);
  FinishIfWhole(build);
}

void VersionMaker::FinishIfWhole(const std::shared_ptr<Build>& build) {
  if (build != build_ || build->chunks_left > 0) return;
  build_ = nullptr;
  WeightVersion& version = *build->version;
  for (const VersionPiecePtr& piece : version.pieces) version.bytes += piece->bytes();
  if (build->before == nullptr) return environment_.made(build->version, nullptr);
  VersionChange& change = *build->change;
  uint64_t memory = 0;
  for (std::vector<ChangedPiece>& changed : build->changed) {
    for (ChangedPiece& piece : changed) {
      change.bytes += piece.bytes();
      memory += (piece.whole == nullptr ? piece.bytes() : 0) + kPieceOverhead;
      change.pieces.push_back(std::move(piece));
    }
  }
  change.share = {environment_.memory, memory};
  environment_.made(build->version, build->change);
}

}  // namespace ballast
