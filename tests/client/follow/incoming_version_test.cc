// What is refused of the parts of a version, before anything is written.
#include "client/cpp/follow/incoming_version.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "client/cpp/follow/followed_weights.h"
#include "tests/client/follow/followed_run.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

class IncomingVersionTest : public ::testing::Test {
 protected:
  // What becomes of a version that comes so, to a reader of the version of step 1.
  absl::Status Take(const VersionParts& parts) const {
    auto incoming = IncomingVersion::Begin(parts[0].begin(), IdOf(1), weights_.tensors(), weights_.bytes());
    if (!incoming.ok()) return incoming.status();
    for (const v1::VersionPart& part : parts) {
      if (!part.has_chunk()) continue;
      if (auto s = incoming->Take(part.chunk()); !s.ok()) return s;
    }
    return incoming->End(parts.back().end()).status();
  }
  void ExpectRefused(const VersionParts& parts, const char* what,
                     absl::StatusCode code = absl::StatusCode::kInternal) const {
    const absl::Status refused = Take(parts);
    EXPECT_EQ(refused.code(), code) << what;
    EXPECT_THAT(std::string(refused.message()), HasSubstr(what));
  }

  const FollowedWeights weights_ = FollowedWeights::Create(kFollowedSpec, kFollowedChunk).value();
  const FollowedRun first_{kFollowedSpec, 1}, second_{kFollowedSpec, 2};
  VersionParts whole_ = second_.Whole(), changes_ = second_.ChangesOf(first_);
  v1::ChangedChunk& chunk_ = *changes_[1].mutable_chunk();
};

TEST_F(IncomingVersionTest, WhatADaemonSendsIsTaken) {
  EXPECT_TRUE(Take(whole_).ok()) << Take(whole_);
  EXPECT_TRUE(Take(changes_).ok()) << Take(changes_);
}

TEST_F(IncomingVersionTest, ChangesOfAnotherVersion) {
  changes_[0].mutable_begin()->mutable_base()->set_generation(2);
  ExpectRefused(changes_, "it changes step 1 of generation 2, and here is step 1 of generation 1");
  changes_[0].mutable_begin()->mutable_base()->set_generation(1);
  const uint64_t kept = 2 * weights_.bytes() - changes_[0].begin().bytes();
  EXPECT_TRUE(IncomingVersion::Begin(changes_[0].begin(), IdOf(1), weights_.tensors(), weights_.bytes(), kept).ok());
  EXPECT_THAT(
      std::string(IncomingVersion::Begin(changes_[0].begin(), IdOf(1), weights_.tensors(), weights_.bytes(), kept + 1)
                      .status()
                      .message()),
      HasSubstr("it is said to have"));
  EXPECT_THAT(
      std::string(IncomingVersion::Begin(changes_[0].begin(), std::nullopt, weights_.tensors(), weights_.bytes())
                      .status()
                      .message()),
      HasSubstr("and here is none"));
}

TEST_F(IncomingVersionTest, MoreBytesThanThereAre) {
  changes_[0].mutable_begin()->set_bytes(uint64_t{1} << 40);
  ExpectRefused(changes_, "said to have 1099511627776 bytes, and all weights of the run have 113");
  changes_[0].mutable_begin()->set_bytes(9);
  ExpectRefused(changes_, "is past the 9 bytes that the version was said to have");
}

TEST_F(IncomingVersionTest, TensorsAndChunksThatAreNotThere) {
  chunk_.set_tensor(6);
  ExpectRefused(changes_, "names tensor 6, and the run has 6");
  chunk_.set_tensor(0);
  chunk_.set_chunk(3);
  ExpectRefused(changes_, "tensor 0 'a' has 3 chunks, and number 3 came");
}

TEST_F(IncomingVersionTest, AnotherOrder) {
  VersionParts swapped = changes_;
  std::swap(swapped[1], swapped[2]);
  ExpectRefused(swapped, "chunk 0 of tensor 0 'a' came after chunk 1");
  VersionParts twice = changes_;
  twice.insert(twice.begin() + 4, twice[3]);
  ExpectRefused(twice, "tensor 0 'a' came twice");
  VersionParts torn = changes_;
  torn.erase(torn.begin() + 3);
  ExpectRefused(torn, "came before the last chunk of tensor 0 'a'");
}

TEST_F(IncomingVersionTest, WhatDoesNotFitItsTensor) {
  v1::ChangedChunk good = chunk_;
  chunk_.set_format("bf16");
  ExpectRefused(changes_, "is in 'bf16', and the run serves it in 'fp32'");
  chunk_ = good;
  chunk_.set_count(5);
  ExpectRefused(changes_, "has 4 elements, and 5 came");
  chunk_ = good;
  chunk_.add_scales(1);
  ExpectRefused(changes_, "needs 0 scales, and 1 came");
  chunk_ = good;
  chunk_.set_position_coding(static_cast<v1::PositionCoding>(9));
  ExpectRefused(changes_, "in a coding that it does not know");
  chunk_ = good;
  chunk_.set_values(std::string(chunk_.values().size(), '!'));
  ExpectRefused(changes_, "tensor 0 'a', chunk 0 arrived damaged", absl::StatusCode::kDataLoss);
}

TEST_F(IncomingVersionTest, ScalesThatAreMissing) {
  for (v1::VersionPart& part : whole_) {
    if (part.has_chunk()) part.mutable_chunk()->clear_scales();
  }
  ExpectRefused(whole_, "chunk 0 of tensor 4 'e' needs 1 scales, and 0 came");
}

TEST_F(IncomingVersionTest, AWholeOneWithHoles) {
  VersionParts changed = whole_;
  changed[1].mutable_chunk()->set_value_coding(v1::VALUE_CODING_DIFFERENCES);
  ExpectRefused(changed, "it is a whole one, and chunk 0 of tensor 0 'a' came as a change");
  VersionParts holes = whole_;
  holes.erase(holes.begin() + 2);
  ExpectRefused(holes, "it is a whole one, and chunk 2 of tensor 0 'a' came out of order");
  VersionParts early = whole_;
  early[1].mutable_chunk()->set_last(true);
  ExpectRefused(early, "came out of order");
}

TEST_F(IncomingVersionTest, AnotherEnd) {
  VersionParts other = changes_;
  other.back().mutable_end()->mutable_id()->set_step(3);
  ExpectRefused(other, "step 2 of generation 1 ended as step 3 of generation 1");
  VersionParts less = changes_;
  less[0].mutable_begin()->set_bytes(less[0].begin().bytes() + 1);
  ExpectRefused(less, "bytes, and ");
  VersionParts early = changes_;
  early.erase(early.end() - 2);
  ExpectRefused(early, "it ended before the last chunk of tensor 5 'f'");
}

TEST(FollowedWeightsTest, AShapeThatNoRunHasIsRefused) {
  v1::RunSpec spec = FollowedSpec();
  spec.mutable_tensors(1)->set_shape(0, -3);
  EXPECT_THAT(std::string(FollowedWeights::Create(spec, 4).status().message()), HasSubstr("tensor 'b' has a shape"));
  spec.mutable_tensors(1)->set_shape(0, int64_t{1} << 41);
  EXPECT_FALSE(FollowedWeights::Create(spec, 4).ok());
}

}  // namespace
}  // namespace ballast
