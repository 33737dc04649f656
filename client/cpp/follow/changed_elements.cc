#include "client/cpp/follow/changed_elements.h"

#include <bit>
#include <utility>

#include "proto/changes.h"

#include "client/cpp/follow/incoming_version.h"

namespace ballast {

ChangedElements::ChangedElements(const TensorTable& tensors) : tensors_(tensors) {
  uint64_t end = 0;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    begins_.push_back(end);
    end += (tensors[i].elements + 63) / 64;
  }
  begins_.push_back(end);
  bits_.assign(end, 0);
}

void ChangedElements::EndVersion() {
  if (std::exchange(ended_, true)) Clear();  // nothing came
}

void ChangedElements::Add(const v1::ChangedChunk& chunk) {
  if (std::exchange(ended_, false)) Clear();
  const ShardPiece piece = tensors_.PieceOf(chunk.tensor(), chunk.chunk());
  uint64_t* const bits = bits_.data() + begins_[chunk.tensor()];
  const auto mark = [&](uint64_t place) {
    bits[(piece.first + place) / 64] |= uint64_t{1} << (piece.first + place) % 64;
  };
  if (!chunk.scales().empty()) {
    for (uint64_t place = 0; place < piece.size(); ++place) mark(place);
    return;
  }
  ForEachChanged(ChangesIn(chunk), piece.size(), mark);
}

uint64_t ChangedElements::Count(uint32_t tensor) const {
  uint64_t count = 0;
  for (uint64_t word = begins_[tensor]; word < begins_[tensor + 1]; ++word) {
    count += static_cast<uint64_t>(std::popcount(bits_[word]));
  }
  return count;
}

void ChangedElements::Places(uint32_t tensor, int64_t* places) const {
  const uint64_t begin = begins_[tensor];
  for (uint64_t word = begin; word < begins_[tensor + 1]; ++word) {
    for (uint64_t left = bits_[word]; left != 0; left &= left - 1) {
      *places++ = static_cast<int64_t>((word - begin) * 64) + std::countr_zero(left);
    }
  }
}

}  // namespace ballast
