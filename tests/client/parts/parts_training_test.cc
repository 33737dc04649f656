// A run on several daemons is, to the bit, the run on one: weights, moments, norms, verdicts and results, in every way of
// making steps and in formats of every kind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "tests/client/parts/parts_team.h"

namespace ballast {
namespace {

struct Variation {
  std::string name;
  std::function<void(Training*)> make = [](Training*) {};
  size_t daemons = 3;
};

void Staged(Training* t) { t->spec.set_commit(v1::COMMIT_MODE_STAGED); }
void Clipped(Training* t, double most) {
  Staged(t);
  t->spec.set_max_grad_norm(most);
}
void Ranks(Training* t, uint32_t world) {
  t->world = world;
  t->spec.set_ranks(world);
}
void Micros(Training* t, uint32_t micros) {
  t->micros = micros;
  t->spec.set_accumulation(micros);
}

std::vector<Variation> Numbers() {
  return {
      {"release"},
      {"two_daemons", [](Training*) {}, 2},
      {"twelve_daemons", [](Training*) {}, 12},
      {"release_ranks", [](Training* t) { Ranks(t, 3); }},
      {"release_micros", [](Training* t) { Micros(t, 3); }},
      {"staged", Staged},
      {"staged_eight_ranks",
       [](Training* t) {
         Clipped(t, 2);
         Ranks(t, 8);
         Micros(t, 2);
       }},
      {"grpc",
       [](Training* t) {
         Clipped(t, 0.5);
         t->transport = TransportChoice::kGrpc;
       }},
  };
}

std::vector<Variation> Verdicts() {
  return {
      {"clipped", [](Training* t) { Clipped(t, 0.5); }},
      {"clipped_by_the_step",
       [](Training* t) {
         Staged(t);
         Ranks(t, 2);
         t->measures = true;
         for (int i = 1; i <= t->steps; ++i) t->ends[i] = {.max_grad_norm = 0.25 * i};
       }},
      {"discarded",
       [](Training* t) {
         Staged(t);
         Ranks(t, 2);
         t->ends[2] = t->ends[4] = {.discard = true};
       }},
      {"discarded_when_measured",
       [](Training* t) {
         Staged(t);
         Ranks(t, 2);
         t->measures = true;
         t->ends[2] = t->ends[4] = {.discard = true};
       }},
      {"spikes_skip",
       [](Training* t) {
         Staged(t);
         t->spec.mutable_spikes()->set_action(v1::SPIKE_ACTION_SKIP);
         t->spec.mutable_spikes()->add_act_on(v1::SPIKE_KIND_GRADIENT_NORM);
       }},
      {"tensor_clip", [](Training* t) { t->spec.mutable_tensor_clip()->set_absolute(0.1); }},
  };
}

std::vector<Variation> Gradients() {
  return {
      {"nonfinite_skips_steps",
       [](Training* t) {
         Staged(t);
         t->spec.set_nonfinite(v1::NONFINITE_POLICY_SKIP_STEP);
         t->nan = {{2, 0}, {4, 7}, {5, 11}};
       }},
      {"nonfinite_skips_blocks",
       [](Training* t) {
         t->nan = {{2, 0}, {4, 7}};
       }},
      {"dynamic_loss_scale",
       [](Training* t) {
         Staged(t);
         t->spec.set_dynamic_loss_scale(true);
         t->nan = {{3, 5}};
         // Tensors of one daemon alone have gradients in one step, and none in another.
         t->absent = {{3, {0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11}}, {5, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}}};
       }},
      {"absent_tensors",
       [](Training* t) {
         Clipped(t, 0.5);
         t->absent = {{1, {0, 3}}, {2, {5}}, {4, {0, 1, 2, 3, 4, 5, 6}}};
       }},
  };
}

// Rule, master, state, serving.
std::vector<Variation> Formats() {
  const std::vector<std::vector<std::string>> kinds = {{"adamw", "fp32", "fp32", ""},
                                                       {"adamw", "split32", "bf16", "bf16"},
                                                       {"adamw", "mcf8", "", "bf16"},
                                                       {"adamw", "flash24", "flash8", ""},
                                                       {"stable_adamw", "", "", "fp16"},
                                                       {"sgd", "fp32", "fp32", ""},
                                                       {"lion", "", "", ""},
                                                       {"collage_plus", "", "", ""}};
  std::vector<Variation> all;
  for (const auto& kind : kinds) {
    std::string name = kind[0];
    for (size_t i = 1; i < kind.size(); ++i) name += kind[i].empty() ? "" : "_" + kind[i];
    all.push_back({name, [kind](Training* t) {
                     v1::GroupSpec* group = t->spec.mutable_groups(0);
                     group->set_rule(kind[0]);
                     group->set_master(kind[1]);
                     group->set_state(kind[2]);
                     group->set_serving(kind[3]);
                     Clipped(t, 1);
                   }});
  }
  return all;
}

std::vector<Variation> Variations() {
  std::vector<Variation> all;
  for (const auto& some : {Numbers(), Verdicts(), Gradients(), Formats()}) {
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

class PartsTrainingTest : public ::testing::TestWithParam<Variation> {};

TEST_P(PartsTrainingTest, IsAsOnOneDaemon) {
  Training training{.spec = DozenTensors()};
  GetParam().make(&training);
  Daemons alone(1), several(GetParam().daemons);
  const std::vector<SeenSteps> wanted = Train(alone.addresses(), training);
  const std::vector<SeenSteps> got = Train(several.addresses(), training);
  ASSERT_EQ(wanted.size(), training.world);
  ASSERT_EQ(got.size(), training.world);
  for (uint32_t r = 0; r < training.world; ++r) {
    EXPECT_EQ(got[r].results, wanted[r].results) << "rank " << r;
    EXPECT_EQ(got[r].norms, wanted[r].norms) << "rank " << r;
    EXPECT_TRUE(got[r].weights == wanted[r].weights) << "rank " << r;
  }
  EXPECT_FALSE(wanted[0].state.empty());
  EXPECT_TRUE(got[0].state == wanted[0].state);
}

INSTANTIATE_TEST_SUITE_P(All, PartsTrainingTest, ::testing::ValuesIn(Variations()),
                         [](const auto& param_info) { return param_info.param.name; });

}  // namespace
}  // namespace ballast
