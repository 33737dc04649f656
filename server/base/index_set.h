// A set of numbers below a size, in a tree of words: one bit for each number, and above each 64 words one word that
// tells which of them are not empty. Every call except Clear touches one word a level; 2^30 numbers take five levels.
// All memory is taken at once.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace ballast {

class IndexSet {
 public:
  explicit IndexSet(size_t size = 0) {
    do {
      size = (size + 63) / 64;
      levels_.emplace_back(size);
    } while (size > 1);
  }
  static constexpr uint64_t Bytes(uint64_t size) {
    uint64_t bytes = 0;
    do {
      size = (size + 63) / 64;
      bytes += size * sizeof(uint64_t) + sizeof(std::vector<uint64_t>);
    } while (size > 1);
    return bytes;
  }

  bool Contains(size_t i) const { return (levels_[0][i / 64] >> (i % 64) & 1) != 0; }
  void Insert(size_t i) {
    for (auto& level : levels_) {
      uint64_t& word = level[i / 64];
      const bool was_empty = word == 0;
      word |= uint64_t{1} << (i % 64);
      if (!was_empty) return;
      i /= 64;
    }
  }
  void Erase(size_t i) {
    for (auto& level : levels_) {
      uint64_t& word = level[i / 64];
      word &= ~(uint64_t{1} << (i % 64));
      if (word != 0) return;
      i /= 64;
    }
  }
  // The least number in it that is at least `from`.
  std::optional<size_t> Next(size_t from) const {
    for (size_t up = 0; up < levels_.size(); ++up) {
      if (from / 64 >= levels_[up].size()) return std::nullopt;
      if (const uint64_t rest = levels_[up][from / 64] >> (from % 64); rest != 0) {
        return Descend(up, from + static_cast<size_t>(std::countr_zero(rest)));
      }
      from = from / 64 + 1;
    }
    return std::nullopt;
  }
  void Clear() {
    for (auto& level : levels_) level.assign(level.size(), 0);
  }
  bool empty() const { return !Next(0); }
  size_t levels() const { return levels_.size(); }

 private:
  size_t Descend(size_t level, size_t i) const {
    while (level-- > 0) i = i * 64 + static_cast<size_t>(std::countr_zero(levels_[level][i]));
    return i;
  }

  std::vector<std::vector<uint64_t>> levels_;  // the numbers first
};

}  // namespace ballast
