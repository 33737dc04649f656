// What a power cut may leave of a ModelFs: all of it, one state after another, or a part that is drawn.
//
//   Outcomes outcomes(fs, 1000);
//   while (const auto left = outcomes.Next()) EXPECT_TRUE(IsWhole(left.get())) << left->Dump();
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tests/server/storage/model_fs.h"

namespace ballast {

// All states in which a power cut now may leave the disk, one after another; where they are more than `limit`, so many
// that the seed leads to, the first of them without anything that was not synced, the second with all of it. States that
// come about in two ways count twice. The file system is not changed in the meantime.
class Outcomes {
 public:
  Outcomes(const ModelFs& fs, uint64_t limit, uint64_t seed = 0);
  bool are_all() const { return are_all_; }
  uint64_t size() const { return size_; }
  // The next; null: there are no more.
  std::unique_ptr<ModelFs> Next();

 private:
  struct Choice {
    uint64_t chosen = 0, options = 0;
  };
  std::unique_ptr<ModelFs> Follow();
  bool Advance();

  const ModelFs& fs_;
  const uint64_t seed_;
  bool are_all_ = true;
  uint64_t size_ = 0, given_ = 0;
  std::vector<Choice> choices_;  // that lead to the next state
};

}  // namespace ballast
