#include "server/metrics/run_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/metrics/metrics.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(RunMetricsTest, ARunMayOutliveTheMetrics) {
  const auto run = Metrics(BuildInfo{}).AddRun({.run_id = "a", .layers = {"h.0"}});
  run->OnStep({.step = 1});
}

TEST(RunMetricsTest, CheckpointsShow) {
  Metrics metrics(BuildInfo{});
  const auto run = metrics.AddRun({.run_id = "a", .layers = {"h.0"}});
  EXPECT_THAT(metrics.Serialize(), HasSubstr("ballast_checkpoints_total{result=\"failed\",run_id=\"a\"} 0\n"));
  run->OnCheckpoint({.step = 7, .bytes = 100, .snapshot_seconds = 1, .write_seconds = 2, .publish_seconds = 0.5});
  run->OnCheckpointFailed();
  run->OnRestored(/*older=*/true);
  EXPECT_THAT(metrics.Serialize(), AllOf(HasSubstr("ballast_checkpoints_total{result=\"success\",run_id=\"a\"} 1\n"),
                                         HasSubstr("ballast_checkpoints_total{result=\"failed\",run_id=\"a\"} 1\n"),
                                         HasSubstr("ballast_durable_step{run_id=\"a\"} 7\n"),
                                         HasSubstr("ballast_checkpoint_bytes{run_id=\"a\"} 100\n"),
                                         HasSubstr("ballast_checkpoint_seconds{phase=\"write\",run_id=\"a\"} 2\n"),
                                         HasSubstr("ballast_checkpoint_timestamp_seconds{run_id=\"a\"} "),
                                         HasSubstr("ballast_restores_total{result=\"older\",run_id=\"a\"} 1\n")));
}

}  // namespace
}  // namespace ballast
