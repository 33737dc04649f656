#include "server/spec/layers.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;

std::vector<std::string> NamesOf(const std::vector<std::string>& tensors, uint32_t max_groups = 64) {
  return LayerGroups(tensors, max_groups).names();
}

TEST(LayerGroupsTest, TensorsShareTheirNameUpToTheFirstNumber) {
  const LayerGroups groups({"model.layers.0.mlp.w", "model.layers.0.attn.q", "model.layers.17.mlp.w"}, 64);
  EXPECT_THAT(groups.names(), ElementsAre("model.layers.0", "model.layers.17"));
  EXPECT_EQ(groups.group(0), 0u);
  EXPECT_EQ(groups.group(1), 0u);
  EXPECT_EQ(groups.group(2), 1u);
  EXPECT_FALSE(groups.overflowed());
}

TEST(LayerGroupsTest, ANumberEndsAPart) {
  EXPECT_THAT(NamesOf({"fc1.weight", "fc1.bias", "layer_3.w", "conv2d.weight", "7"}),
              ElementsAre("fc1", "layer_3", "conv2d", "7"));
}

TEST(LayerGroupsTest, TensorsOutsideNumberedLayersAreGroupedByRole) {
  EXPECT_THAT(NamesOf({"model.embed_tokens.weight", "transformer.wte.weight", "lm_head.weight", "model.norm.weight",
                       "final_layernorm.bias", "ln_f.weight", "Embeddings.word", "multihead_attn.in_proj", "bias"}),
              ElementsAre("embed", "head", "norm", "multihead_attn", "bias"));
}

TEST(LayerGroupsTest, GroupsBeyondTheCapAreOther) {
  const LayerGroups groups({"h.0.w", "h.1.w", "h.2.w", "h.3.w", "h.0.b"}, 3);
  EXPECT_THAT(groups.names(), ElementsAre("h.0", "h.1", "other"));
  EXPECT_EQ(groups.group(2), 2u);
  EXPECT_EQ(groups.group(3), 2u);
  EXPECT_EQ(groups.group(4), 0u);
  EXPECT_TRUE(groups.overflowed());
  EXPECT_THAT(NamesOf({"h.0.w", "h.1.w"}, 1), ElementsAre("other"));
}

TEST(LayerGroupsTest, AGroupThatIsCalledOtherTakesTheOverflow) {
  const LayerGroups groups({"other.w", "h.1.w", "h.2.w", "h.3.w"}, 3);
  EXPECT_THAT(groups.names(), ElementsAre("other", "h.1"));
  EXPECT_EQ(groups.group(3), 0u);
}

TEST(LayerGroupsTest, LabelsAreValidUtf8OfAtMost128Bytes) {
  EXPECT_THAT(NamesOf({"a\xff.w"}), ElementsAre("a\xEF\xBF\xBD"));
  EXPECT_THAT(NamesOf({""}), ElementsAre("other"));
  std::string name = "x";  // then two bytes a character: the cut would fall into one
  for (int i = 0; i < 100; ++i) name += "\xC3\xA9";
  EXPECT_EQ(NamesOf({name})[0].size(), 127u);
}

}  // namespace
}  // namespace ballast
