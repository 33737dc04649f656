#include "tests/client/follow/followed_run.h"

#include <algorithm>
#include <array>

#include "absl/types/span.h"
#include "proto/changes.h"
#include "proto/checksum.h"

#include "tests/client/fake_daemon.h"

namespace ballast {
namespace {

constexpr int kMost = 1000;  // messages of a batch

absl::Span<const std::byte> PieceOf(const std::string& codes, const ShardPiece& piece, uint64_t width) {
  return BytesOf(codes).subspan(piece.first * width, piece.size() * width);
}

void Seal(v1::ChangedChunk* chunk) { chunk->set_crc32c(Crc32c(BytesOf(chunk->positions() + chunk->values()))); }

}  // namespace

v1::RunSpec FollowedSpec() {
  v1::RunSpec spec = FakeSpec();
  spec.mutable_follow();
  const auto add = [&](const char* name, const std::vector<int64_t>& shape, const char* serving) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(name);
    tensor->set_dtype("fp32");
    tensor->mutable_shape()->Add(shape.begin(), shape.end());
    tensor->set_group(static_cast<uint32_t>(spec.groups_size()));
    spec.add_groups()->set_serving(serving);
  };
  add("e", {3, 5}, "int8-row");
  add("f", {7}, "bf16");
  return spec;
}

v1::VersionId IdOf(uint64_t step, uint64_t generation) {
  v1::VersionId id;
  id.set_step(step);
  id.set_generation(generation);
  return id;
}

VersionParts Batched(const VersionParts& parts) {
  VersionParts batches;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i % kMost == 0) batches.emplace_back();
    *batches.back().add_batch() = parts[i];
  }
  return batches;
}

FollowedRun::FollowedRun(const v1::RunSpec& spec, uint64_t step_made)
    : step(step_made), tensors_(TensorTable::Create(spec, kFollowedChunk).value()) {
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    std::string bytes(tensors_[i].served_bytes(), '\0');
    for (size_t k = 0; k < bytes.size(); ++k) bytes[k] = static_cast<char>(7 * k + 31 * i + 101 * step);
    codes.push_back(std::move(bytes));
    std::vector<float>& of_rows = scales.emplace_back(tensors_[i].scales());
    for (size_t k = 0; k < of_rows.size(); ++k) of_rows[k] = static_cast<float>(k + step);
  }
}

FollowedRun FollowedRun::Next() const {
  FollowedRun next = *this;
  ++next.step;
  for (std::string& bytes : next.codes) bytes[next.step % bytes.size()] ^= 1;
  return next;
}

uint64_t FollowedRun::Digest(uint32_t tensor) const {
  const uint64_t of_codes = WeightDigest(BytesOf(codes[tensor]));
  if (scales[tensor].empty()) return of_codes;
  const auto bytes = [](const auto& of) {
    return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(of.data()), of.size() * sizeof(of[0]));
  };
  return WeightDigest(bytes(std::array{of_codes, WeightDigest(bytes(scales[tensor]))}));
}

v1::ChangedChunk FollowedRun::Chunk(uint32_t tensor, uint64_t chunk) const {
  const WireTensor& wire = tensors_[tensor];
  const ShardPiece piece = tensors_.PieceOf(tensor, chunk);
  const auto codes_of_it = PieceOf(codes[tensor], piece, wire.serving_element_bytes);
  v1::ChangedChunk made;
  made.set_tensor(tensor);
  made.set_chunk(chunk);
  made.set_format(wire.serving);
  made.set_count(piece.size());
  made.set_values(codes_of_it.data(), codes_of_it.size());
  for (uint64_t i = 0; i < ScalesNeeded(wire.row_length, piece.first, piece.last); ++i) {
    made.add_scales(scales[tensor][piece.first / wire.row_length + i]);
  }
  Seal(&made);
  return made;
}

VersionParts FollowedRun::Whole(const std::vector<uint32_t>& left_out) const {
  std::vector<v1::ChangedChunk> chunks;
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (std::find(left_out.begin(), left_out.end(), i) != left_out.end()) continue;
    for (uint64_t k = 0; k < tensors_[i].chunks; ++k) chunks.push_back(Chunk(i, k));
  }
  return Told(chunks, nullptr);
}

VersionParts FollowedRun::ChangesOf(const FollowedRun& before) const {
  std::vector<v1::ChangedChunk> chunks;
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    const uint64_t width = tensors_[i].serving_element_bytes;
    for (uint64_t k = 0; k < tensors_[i].chunks; ++k) {
      const ShardPiece piece = tensors_.PieceOf(i, k);
      const auto from = PieceOf(before.codes[i], piece, width), to = PieceOf(codes[i], piece, width);
      v1::ChangedChunk chunk = Chunk(i, k);
      const FoundChanges found = FindChanges(from, to, width, to.size() - 1);
      if (const auto& changes = found.changes) {
        if (changes->count == 0 && scales[i] == before.scales[i]) continue;
        chunk.set_position_coding(static_cast<v1::PositionCoding>(changes->position_coding));
        chunk.set_value_coding(static_cast<v1::ValueCoding>(changes->value_coding));
        chunk.set_count(changes->count);
        chunk.set_positions(changes->positions);
        chunk.set_values(changes->values);
        Seal(&chunk);
      }
      chunks.push_back(std::move(chunk));
    }
  }
  return Told(chunks, &before);
}

VersionParts FollowedRun::Told(const std::vector<v1::ChangedChunk>& chunks, const FollowedRun* base) const {
  uint64_t bytes = 0, changed = 0;
  VersionParts parts(1);
  for (size_t i = 0; i < chunks.size(); ++i) {
    v1::ChangedChunk& chunk = *parts.emplace_back().mutable_chunk() = chunks[i];
    const bool last = i + 1 == chunks.size() || chunks[i + 1].tensor() != chunk.tensor();
    chunk.set_last(last);
    if (last) chunk.set_digest(Digest(chunk.tensor()));
    bytes += chunk.positions().size() + chunk.values().size() + 4 * static_cast<uint64_t>(chunk.scales_size());
    changed += chunk.count();
  }
  v1::VersionBegin& begin = *parts[0].mutable_begin();
  *begin.mutable_id() = IdOf(step, generation);
  if (base != nullptr) *begin.mutable_base() = IdOf(base->step, base->generation);
  begin.set_bytes(bytes);
  begin.set_closed_unix_s(1e9 + static_cast<double>(step));
  v1::VersionEnd& end = *parts.emplace_back().mutable_end();
  *end.mutable_id() = begin.id();
  end.set_changed(changed);
  for (uint32_t i = 0; i < tensors_.size(); ++i) end.set_elements(end.elements() + tensors_[i].elements);
  return parts;
}

}  // namespace ballast
