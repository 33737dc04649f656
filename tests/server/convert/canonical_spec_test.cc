#include "server/convert/canonical_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/tls/sha256.h"

#include "tests/server/specs.h"

namespace ballast {
namespace {

using testing::SmallSpec;

std::string Difference(const v1::RunSpec& a, const v1::RunSpec& b) {
  return FirstDifference(Canonical(a), Canonical(b)).value_or("none");
}

TEST(CanonicalSpecTest, DefaultsWrittenOutAreTheSameSpec) {
  v1::RunSpec written = SmallSpec();
  written.mutable_groups(0)->set_master("split24");
  written.mutable_groups(0)->set_rounding("stochastic");
  (*written.mutable_groups(0)->mutable_hyper())["beta1"] = 0.9;
  written.set_stats_every(10);
  written.set_accumulation(1);
  written.set_ranks(1);
  written.mutable_tensors(0)->set_lr_scale(1);
  EXPECT_EQ(Difference(SmallSpec(), written), "none");
  v1::RunSpec peak = SmallSpec(), peak_as_hyper = SmallSpec();
  peak.mutable_groups(0)->set_lr_peak(0.5);
  (*peak_as_hyper.mutable_groups(0)->mutable_hyper())["lr_peak"] = 0.5;
  EXPECT_EQ(Difference(peak, peak_as_hyper), "none");
  EXPECT_NE(Difference(peak, SmallSpec()), "none");
  EXPECT_EQ(Sha256Hex(SerializeCanonical(Canonical(SmallSpec()))), Sha256Hex(SerializeCanonical(Canonical(written))));
}

TEST(CanonicalSpecTest, TheFirstDifferenceNamesPathAndBothValues) {
  v1::RunSpec other = SmallSpec();
  other.mutable_tensors(1)->set_dtype("bf16");
  other.set_seed(8);
  EXPECT_EQ(Difference(SmallSpec(), other), "tensors[1].dtype is \"fp32\", asked for is \"bf16\"");
  other = SmallSpec();
  (*other.mutable_groups(0)->mutable_hyper())["lr"] = 0.5;
  EXPECT_THAT(Difference(SmallSpec(), other),
              ::testing::HasSubstr("groups[0].hyper[\"lr\"] is 0.001, asked for is 0.5"));
  other = SmallSpec();
  other.mutable_tensors(0)->set_shape(1, 101);
  EXPECT_EQ(Difference(SmallSpec(), other), "tensors[0].shape[1] is 100, asked for is 101");
  other = SmallSpec();
  other.add_tensors()->set_name("x");
  EXPECT_EQ(Difference(SmallSpec(), other), "tensors is 3 long, asked for is 4 long");
  other = SmallSpec();
  other.set_seed(8);
  EXPECT_EQ(Difference(SmallSpec(), other), "seed is 7, asked for is 8");
}

TEST(CanonicalSpecTest, PoliciesArePartOfIt) {
  v1::RunSpec other = SmallSpec();
  other.set_commit(v1::COMMIT_MODE_STAGED);
  EXPECT_EQ(Difference(SmallSpec(), other), "commit is COMMIT_MODE_RELEASE, asked for is COMMIT_MODE_STAGED");
  v1::RunSpec clipped = other;
  clipped.set_max_grad_norm(1);
  EXPECT_EQ(Difference(other, clipped), "max_grad_norm is unset, asked for is 1");
  v1::RunSpec dynamic = other;
  dynamic.set_dynamic_loss_scale(true);
  EXPECT_NE(Difference(other, dynamic), "none");
  v1::RunSpec written = dynamic;
  written.set_nonfinite(v1::NONFINITE_POLICY_SKIP_STEP);
  EXPECT_EQ(Difference(dynamic, written), "none");
}

TEST(CanonicalSpecTest, SnapshotsArePartOfIt) {
  v1::RunSpec none = SmallSpec(), kept = SmallSpec(), written = SmallSpec();
  none.mutable_rewind();
  EXPECT_EQ(Difference(SmallSpec(), none), "none");
  kept.mutable_rewind()->set_snapshots(2);
  EXPECT_NE(Difference(SmallSpec(), kept), "none");
  written.mutable_rewind()->set_snapshots(2);
  written.mutable_rewind()->set_every(50);
  EXPECT_EQ(Difference(kept, written), "none");
  written.mutable_rewind()->set_every(20);
  EXPECT_EQ(Difference(kept, written), "rewind.every is 50, asked for is 20");
}

TEST(CanonicalSpecTest, Sha256IsTheStandards) {
  EXPECT_EQ(Sha256Hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

}  // namespace
}  // namespace ballast
