#include "server/metrics/run_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "server/metrics/metric_table.h"
#include "server/metrics/metrics.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(RunMetricsTest, ARunMayOutliveTheMetrics) {
  const auto run = Metrics(BuildInfo{}).AddRun({.run_id = "a", .layers = {"h.0"}});
  run->OnStep({.step = 1});
}

TEST(RunMetricsTest, StatesAreOneHot) {
  Metrics metrics(BuildInfo{});
  metrics.SetState("serving");
  const auto run = metrics.AddRun({.run_id = "a", .layers = {"h.0"}});
  run->OnState("training");
  const std::string shown = metrics.Serialize();
  for (const char* sample :
       {"ballast_ready 1", "ballast_state{state=\"serving\"} 1", "ballast_state{state=\"starting\"} 0",
        "ballast_run_state{run_id=\"a\",state=\"training\"} 1", "ballast_run_state{run_id=\"a\",state=\"waiting\"} 0",
        "ballast_runs{state=\"training\"} 1", "ballast_runs{state=\"waiting\"} 0"}) {
    EXPECT_THAT(shown, HasSubstr(absl::StrCat("\n", sample, "\n")));
  }
}

// A run that is written to a disk.
class DurableRunTest : public ::testing::Test {
 protected:
  // `series`, with its labels, is shown with this value.
  void ExpectShown(const std::string& series, const std::string& value) const {
    EXPECT_THAT(metrics_.Serialize(), HasSubstr(absl::StrCat("\n", series, " ", value, "\n")));
  }

  Metrics metrics_{BuildInfo{}, {.unix_s = [] { return 1.7e9; }, .steady_s = [] { return 1000; }}};
  const std::unique_ptr<RunMetrics> run_ = metrics_.AddRun({.run_id = "a", .layers = {"h.0"}, .durable = true});
};

TEST_F(DurableRunTest, WhatAlertsLookAtExistsAtZero) {
  for (const char* trigger : {"interval", "request", "drain"}) {
    for (const char* result : {"success", "failed"}) {
      ExpectShown(
          absl::StrCat("ballast_checkpoints_total{result=\"", result, "\",run_id=\"a\",trigger=\"", trigger, "\"}"),
          "0");
    }
  }
  for (const char* reason : {"checksum", "truncated", "missing", "manifest", "version"}) {
    ExpectShown(absl::StrCat("ballast_checkpoint_verify_failures_total{reason=\"", reason, "\",run_id=\"a\"}"), "0");
  }
  for (const char* result : {"latest", "older", "failed"}) {
    ExpectShown(absl::StrCat("ballast_restores_total{result=\"", result, "\",run_id=\"a\"}"), "0");
  }
  ExpectShown("ballast_checkpoint_interval_target_seconds{run_id=\"a\"}", "0");
  ExpectShown("ballast_checkpoint_duration_seconds_count{phase=\"publish\",run_id=\"a\"}", "0");
  EXPECT_THAT(metrics_.Serialize(), Not(HasSubstr("\nballast_checkpoint_last_success"))) << "there was none yet";
}

// What the undone steps told is gone; what was counted of them stays.
TEST_F(DurableRunTest, ARewindShowsTheStepGoneBackTo) {
  const StepRecord first = {.step = 4, .loss = 2, .learning_rate = 0.5, .grad_norm = 3};
  run_->OnStep(first);
  StepRecord last = {.step = 9, .loss = 1, .grad_norm = 7, .gradient_flushed = 0.5};
  last.layers = {{.rms_ratio = 1.5, .gradient_norm = 7}};
  run_->OnStep(last);
  ExpectShown("ballast_rms_ratio{layer=\"h.0\",run_id=\"a\"}", "1.5");
  run_->OnWentBack(first);
  ExpectShown("ballast_step{run_id=\"a\"}", "4");
  ExpectShown("ballast_loss{run_id=\"a\"}", "2");
  ExpectShown("ballast_gradient_norm{run_id=\"a\"}", "3");
  ExpectShown("ballast_learning_rate{run_id=\"a\"}", "0.5");
  ExpectShown("ballast_steps_applied_total{run_id=\"a\"}", "2");
  for (const char* gone : {"ballast_rms_ratio{", "ballast_layer_gradient_norm{", "ballast_gradient_flushed_ratio{"}) {
    EXPECT_THAT(metrics_.Serialize(), Not(HasSubstr(absl::StrCat("\n", gone))));
  }
  run_->OnStep(last);
  ExpectShown("ballast_rms_ratio{layer=\"h.0\",run_id=\"a\"}", "1.5");
}

TEST_F(DurableRunTest, ARunThatWasReadBackShowsItsStepThoughThatWasSkipped) {
  run_->OnWentBack({.step = 18, .outcome = Outcome::kSkipped});
  ExpectShown("ballast_step{run_id=\"a\"}", "18");
  EXPECT_THAT(metrics_.Serialize(), Not(HasSubstr("\nballast_last_step_timestamp_seconds{")));
}

TEST_F(DurableRunTest, ACheckpointShows) {
  run_->OnCheckpoint({.trigger = "request",
                      .step = 7,
                      .bytes = 100,
                      .snapshot_seconds = 0.5,
                      .write_seconds = 20,
                      .publish_seconds = 0.05,
                      .stall_seconds = 0.25});
  ExpectShown("ballast_checkpoints_total{result=\"success\",run_id=\"a\",trigger=\"request\"}", "1");
  ExpectShown("ballast_checkpoints_total{result=\"success\",run_id=\"a\",trigger=\"interval\"}", "0");
  ExpectShown("ballast_checkpoints_total{result=\"failed\",run_id=\"a\",trigger=\"request\"}", "0");
  ExpectShown("ballast_checkpoint_duration_seconds_sum{phase=\"snapshot\",run_id=\"a\"}", "0.5");
  ExpectShown("ballast_checkpoint_duration_seconds_sum{phase=\"publish\",run_id=\"a\"}", "0.05");
  ExpectShown("ballast_checkpoint_duration_seconds_bucket{phase=\"write\",run_id=\"a\",le=\"5\"}", "0");
  ExpectShown("ballast_checkpoint_duration_seconds_bucket{phase=\"write\",run_id=\"a\",le=\"30\"}", "1");
  ExpectShown("ballast_checkpoint_step_stall_seconds_sum{run_id=\"a\"}", "0.25");
  ExpectShown("ballast_checkpoint_last_success_timestamp_seconds{run_id=\"a\"}", "1700000000");
  ExpectShown("ballast_checkpoint_last_success_step{run_id=\"a\"}", "7");
  ExpectShown("ballast_checkpoint_size_bytes{run_id=\"a\"}", "100");
  ExpectShown("ballast_durable_step{run_id=\"a\"}", "7");
}

TEST_F(DurableRunTest, ACheckpointThatFailsLeavesTheLastOneAsItWas) {
  run_->OnCheckpoint({.trigger = "interval", .step = 7, .bytes = 100});
  run_->OnCheckpointFailed("interval");
  run_->OnCheckpointFailed("drain");
  ExpectShown("ballast_checkpoints_total{result=\"failed\",run_id=\"a\",trigger=\"interval\"}", "1");
  ExpectShown("ballast_checkpoints_total{result=\"failed\",run_id=\"a\",trigger=\"drain\"}", "1");
  ExpectShown("ballast_checkpoints_total{result=\"success\",run_id=\"a\",trigger=\"interval\"}", "1");
  ExpectShown("ballast_checkpoint_last_success_step{run_id=\"a\"}", "7");
  ExpectShown("ballast_checkpoint_step_stall_seconds_count{run_id=\"a\"}", "1");
}

TEST_F(DurableRunTest, ARewindTakesTheDurableStepBack) {
  run_->OnCheckpoint({.trigger = "interval", .step = 7});
  run_->OnDurable(4);
  ExpectShown("ballast_durable_step{run_id=\"a\"}", "4");
  ExpectShown("ballast_checkpoint_last_success_step{run_id=\"a\"}", "7");
}

TEST_F(DurableRunTest, DamageAndRestoresAreCounted) {
  run_->OnVerifyFailed("truncated");
  run_->OnVerifyFailed("a reason nobody listed");
  run_->OnRestored("older");
  run_->SetCheckpointInterval(600);
  run_->SetCheckpointInterval(90.5);
  ExpectShown("ballast_checkpoint_verify_failures_total{reason=\"truncated\",run_id=\"a\"}", "1");
  ExpectShown("ballast_checkpoint_verify_failures_total{reason=\"other\",run_id=\"a\"}", "1");
  ExpectShown("ballast_restores_total{result=\"older\",run_id=\"a\"}", "1");
  ExpectShown("ballast_restores_total{result=\"latest\",run_id=\"a\"}", "0");
  ExpectShown("ballast_checkpoint_interval_target_seconds{run_id=\"a\"}", "90.5");
}

TEST_F(DurableRunTest, ShowsTheTrainingThatIsOnNoDisk) {
  run_->OnActivity({.unsaved_s = 12.5});
  ExpectShown("ballast_unsaved_training_seconds{run_id=\"a\"}", "12.5");
}

TEST_F(DurableRunTest, FailuresOfCopiesAreCountedUntilOneSucceeds) {
  for (const char* result : {"failed", "timeout", "skipped"}) run_->OnCopied(result);
  ExpectShown("ballast_checkpoint_hook_failures_in_a_row{run_id=\"a\"}", "2");
  run_->OnCopied("success");
  ExpectShown("ballast_checkpoint_hook_failures_in_a_row{run_id=\"a\"}", "0");
}

// Also not when their labels have values that are known beforehand, and admission does not count them.
TEST(RunMetricsTest, ARunThatIsNotWrittenHasNoSeriesOfDurability) {
  Metrics metrics(BuildInfo{});
  const auto run = metrics.AddRun({.run_id = "a", .layers = {"h.0"}});
  run->OnStep({.step = 1});
  const std::string shown = metrics.Serialize();
  uint64_t families = 0;
  for (const MetricFamily& family : kMetricFamilies) {
    if (family.of_runs != OfRuns::kDurable) continue;
    ++families;
    EXPECT_FALSE(absl::StrContains(shown, family.name)) << family.name;
  }
  EXPECT_GE(families, 10u);
  EXPECT_LT(Metrics::SeriesOfRun({}), Metrics::SeriesOfRun({.durable = true}));
}

TEST(MetricsStorageTest, ADaemonWithoutStorageHasNoSeriesOfIt) {
  Metrics metrics(BuildInfo{});
  EXPECT_THAT(metrics.Serialize(), Not(HasSubstr("ballast_storage_")));
  EXPECT_THAT(metrics.Serialize(), Not(HasSubstr("ballast_restore_duration_seconds")));
}

TEST(MetricsStorageTest, RoomAndRestoresShow) {
  Metrics metrics(BuildInfo{});
  metrics.SetStorage(5, 10);
  metrics.SetStorage(4, 10);
  metrics.OnRestore(3);
  metrics.OnRestore(1000);
  metrics.OnJournalSync(0.003);
  const std::string shown = metrics.Serialize();
  EXPECT_THAT(shown, HasSubstr("\nballast_storage_free_bytes 4\n"));
  EXPECT_THAT(shown, HasSubstr("\nballast_storage_size_bytes 10\n"));
  EXPECT_THAT(shown, HasSubstr("\nballast_restore_duration_seconds_sum 1003\n"));
  EXPECT_THAT(shown, HasSubstr("\nballast_restore_duration_seconds_bucket{le=\"5\"} 1\n"));
  EXPECT_THAT(shown, HasSubstr("\nballast_restore_duration_seconds_count 2\n"));
  EXPECT_THAT(shown, HasSubstr("\nballast_journal_fsync_duration_seconds_bucket{le=\"0.002\"} 0\n"));
  EXPECT_THAT(shown, HasSubstr("\nballast_journal_fsync_duration_seconds_bucket{le=\"0.004\"} 1\n"));
}

}  // namespace
}  // namespace ballast
