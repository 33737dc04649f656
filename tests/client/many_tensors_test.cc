// As many tensors as a run may have by default, with names of the length that models give them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "absl/strings/str_format.h"

#include "tests/client/quiet_client.h"
#include "tests/client/real_daemon.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kManyTensors = 100000;
constexpr uint64_t kElementsEach = 4;

v1::RunSpec ManyTensors() {
  v1::RunSpec spec;
  spec.set_run_id("many");
  for (uint32_t i = 0; i < kManyTensors; ++i) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(absl::StrFormat("model.layers.%05d.attention.q_proj.weight", i));
    tensor->set_dtype("fp32");
    tensor->add_shape(kElementsEach);
  }
  v1::GroupSpec* group = spec.add_groups();
  group->set_rule("sgd");
  group->set_master("fp32");
  return spec;
}

TEST(ManyTensorsTest, ManyTensorsArePlannedCreatedAttachedToAndMeasured) {
  RealDaemon daemon;
  const auto client = QuietClient(daemon.address());
  const v1::RunSpec spec = ManyTensors();
  const auto plan = client->Plan(spec);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const auto created = client->CreateRun(spec);
  ASSERT_TRUE(created.ok()) << created.status();
  EXPECT_EQ(created->plan().server().SerializeAsString(), plan->server().SerializeAsString());
  ASSERT_TRUE(client->Attach({.run_id = "many"}).ok());
  std::vector<float> weights(kElementsEach);
  EXPECT_TRUE(client->BindWeights(kManyTensors - 1, weights.data(), kElementsEach * sizeof(float)).ok());
  const auto run = client->GetRun("many");
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_EQ(run->spec().tensors(kManyTensors - 1).name(), spec.tensors(kManyTensors - 1).name());
  const std::string metrics = daemon.metrics();
  EXPECT_LT(std::count(metrics.begin(), metrics.end(), '\n'), 10000);
}

TEST(ManyTensorsTest, ASpecThatIsTooLongNamesTheKey) {
  Config config = RealDaemon::Small();
  config.limits.spec_bytes = 4 << 20;
  RealDaemon daemon(config);
  const auto client = QuietClient(daemon.address());
  const v1::RunSpec spec = ManyTensors();
  for (const absl::Status& refused : {client->CreateRun(spec).status(), client->Plan(spec).status()}) {
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr("run 'many', 100000 tensors"), HasSubstr("limits.spec_bytes; raise it")));
  }
}

}  // namespace
}  // namespace ballast
