#include "server/metrics/metrics.h"

#include <atomic>
#include <chrono>
#include <limits>
#include <map>
#include <set>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "server/metrics/metric_table.h"
#include "server/plan/plan.h"

namespace ballast {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Key;
using ::testing::Not;
using ::testing::Pair;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// The samples of an exposition: series -> value, as text.
std::map<std::string, std::string> SamplesOf(const std::string& exposition) {
  std::map<std::string, std::string> samples;
  for (const absl::string_view line : absl::StrSplit(exposition, '\n', absl::SkipEmpty())) {
    if (absl::StartsWith(line, "#")) continue;
    const size_t blank = line.rfind(' ');
    EXPECT_TRUE(samples.emplace(line.substr(0, blank), line.substr(blank + 1)).second) << "twice: " << line;
  }
  return samples;
}

class MetricsTest : public ::testing::Test {
 protected:
  std::map<std::string, std::string> Samples() const { return SamplesOf(metrics_.Serialize()); }

  static RunLabels Labels(const std::string& run_id, std::vector<std::string> layers = {"embed", "h.0"}) {
    return {.run_id = run_id,
            .optimizer = "adamw",
            .master = "split",
            .state = "companded8",
            .serving = "bf16",
            .parameters = 1234,
            .layers = std::move(layers),
            .two_components = true,
            .durable = true,
            .followed = true};
  }

  static StepRecord Step(uint64_t step, size_t layers = 2) {
    const StepRecord::Layer layer{.rms_ratio = 1.5,
                                  .update_to_weight_ratio = 0.001,
                                  .edq_ratio = 0.9,
                                  .unchanged_ratio = 0.25,
                                  .hi_edq_ratio = 0.5,
                                  .gradient_norm = 3};
    return {.step = step,
            .outcome = Outcome::kApplied,
            .reason = "",
            .seconds = 0.2,
            .receive_seconds = 0.15,
            .update_seconds = 0.01,
            .loss = 2.5,
            .learning_rate = 1e-3,
            .grad_norm = 4,
            .gradient_flushed = 0.01,
            .gradient_overflowed = 0.001,
            .nonfinite_tensors = 1,
            .rejected_blocks = 2,
            .layers = std::vector<StepRecord::Layer>(layers, layer),
            .tensor_rms = {0.9, 1.1, 2.5}};
  }

  // What a run reports beside its steps.
  static void SayTheRest(RunMetrics* run) {
    run->OnRankSeen(0);
    run->OnSpikes({.events = {}, .scores = {}, .curvature = 0.5});
    run->OnCheckpoint({.trigger = "interval", .step = 1});
    run->OnVersion({.step = 1, .bytes = 2});
    run->OnFollowers({.count = 1});
  }

  double now_s_ = 1000;
  Metrics metrics_{{.version = "0.1.0", .revision = "abc1234", .compiler = "GNU 12", .cuda = "none"},
                   {.unix_s = [this] { return 1.7e9 + now_s_; }, .steady_s = [this] { return now_s_; }}};
};

TEST_F(MetricsTest, EveryFamilyIsShown) {
  const auto run = metrics_.AddRun(Labels("a"));
  run->OnStep(Step(1));
  SayTheRest(run.get());
  for (const char* device : {"cpu", "cuda:0"}) metrics_.SetMemory(device, {}, 1);
  metrics_.SetStorage(1, 2);
  metrics_.SetCertificate("certificate", 1, 2);
  metrics_.OnRestore(1);
  metrics_.OnJournalSync(1);
  metrics_.SetGrantExpiry(1);
  metrics_.SetLastReload("tls", true);
  metrics_.SetConnections(1);
  const auto relayed = metrics_.AddRelayed("relayed");
  relayed->OnRelay({.connected = true, .closed_unix_s = 1});
  for (const std::string exposition = metrics_.Serialize(); const MetricFamily& family : kMetricFamilies) {
    EXPECT_THAT(exposition, HasSubstr(absl::StrCat("# TYPE ", family.name, " "))) << family.name;
  }
}

TEST_F(MetricsTest, NothingIsShownThatTheTableDoesNotName) {
  const auto run = metrics_.AddRun(Labels("a"));
  run->OnStep(Step(1));
  std::set<std::string> names;
  for (const MetricFamily& family : kMetricFamilies) names.insert(family.name);
  EXPECT_EQ(names.size(), kMetricFamilies.size()) << "a family is there twice";
  for (const absl::string_view line : absl::StrSplit(metrics_.Serialize(), '\n')) {
    if (!absl::StartsWith(line, "# TYPE ")) continue;
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    EXPECT_THAT(names, Contains(words[2]));
  }
}

TEST_F(MetricsTest, NamesAndLabelsKeepTheRules) {
  for (const MetricFamily& family : kMetricFamilies) {
    EXPECT_EQ(family.type == MetricType::kCounter, absl::EndsWith(family.name, "_total")) << family.name;
    EXPECT_EQ(family.type == MetricType::kHistogram, !family.buckets.empty()) << family.name;
    for (const MetricLabel& label : LabelsOf(family)) {
      EXPECT_NE(label.name, "job") << family.name;
      EXPECT_NE(label.name, "instance") << family.name;
      EXPECT_NE(label.name, "tensor") << family.name;
    }
  }
}

TEST_F(MetricsTest, CountersOfARunExistAtZeroFromTheStart) {
  const auto run = metrics_.AddRun(Labels("a"));
  const auto samples = Samples();
  for (const char* series :
       {"ballast_steps_applied_total{run_id=\"a\"}", "ballast_steps_aborted_total{reason=\"rank_lost\",run_id=\"a\"}",
        "ballast_steps_partial_total{reason=\"restarted\",run_id=\"a\"}",
        "ballast_chunks_rejected_total{reason=\"checksum\",run_id=\"a\"}",
        "ballast_chunks_duplicate_total{match=\"different\",run_id=\"a\"}",
        "ballast_received_bytes_total{run_id=\"a\",transport=\"grpc\"}",
        "ballast_rank_reconnects_total{rank=\"0\",run_id=\"a\"}", "ballast_step_duration_seconds_count{run_id=\"a\"}",
        "ballast_gradients_nonfinite_total{run_id=\"a\"}"}) {
    EXPECT_THAT(samples, Contains(Pair(series, "0")));
  }
  EXPECT_THAT(samples, Not(Contains(Key("ballast_loss{run_id=\"a\"}")))) << "no loss was sent";
}

TEST_F(MetricsTest, CountersOfTheDaemonExistAtZeroFromTheStart) {
  const auto samples = Samples();
  for (const char* method :
       {"CreateRun", "Attach", "LoadState", "Train", "Pull", "GetServer", "ListRuns", "Plan", "other"}) {
    EXPECT_THAT(samples, Contains(Pair(absl::StrCat("ballast_rpc_started_total{method=\"", method, "\"}"), "0")));
    EXPECT_THAT(samples,
                Contains(Pair(absl::StrCat("ballast_rpc_handled_total{code=\"OK\",method=\"", method, "\"}"), "0")));
  }
  EXPECT_THAT(samples, Contains(Pair("ballast_admission_rejected_total{reason=\"memory\"}", "0")));
}

TEST_F(MetricsTest, AnAppliedStepShows) {
  const auto run = metrics_.AddRun(Labels("a"));
  run->OnStep(Step(7));
  const auto samples = Samples();
  const std::map<std::string, std::string> wanted = {
      {"ballast_steps_applied_total{run_id=\"a\"}", "1"},
      {"ballast_step{run_id=\"a\"}", "7"},
      {"ballast_last_step_timestamp_seconds{run_id=\"a\"}", "1700001000"},
      {"ballast_loss{run_id=\"a\"}", "2.5"},
      {"ballast_gradient_norm{run_id=\"a\"}", "4"},
      {"ballast_rms_ratio{layer=\"h.0\",run_id=\"a\"}", "1.5"},
      {"ballast_rms_ratio_recent_max{layer=\"h.0\",run_id=\"a\"}", "1.5"},
      {"ballast_layer_gradient_norm{layer=\"embed\",run_id=\"a\"}", "3"},
      {"ballast_unchanged_ratio{layer=\"embed\",run_id=\"a\"}", "0.25"},
      {"ballast_gradients_nonfinite_total{run_id=\"a\"}", "1"},
      {"ballast_blocks_rejected_total{run_id=\"a\"}", "2"},
      {"ballast_rms_ratio_distribution_bucket{run_id=\"a\",le=\"0.8\"}", "0"},
      {"ballast_rms_ratio_distribution_bucket{run_id=\"a\",le=\"1\"}", "1"},
      {"ballast_rms_ratio_distribution_bucket{run_id=\"a\",le=\"3\"}", "3"},
      {"ballast_rms_ratio_distribution_count{run_id=\"a\"}", "3"},
      {"ballast_run_parameters{run_id=\"a\"}", "1234"},
      {"ballast_run_info{master=\"split\",optimizer=\"adamw\",run_id=\"a\",serving=\"bf16\",state_format="
       "\"companded8\"}",
       "1"}};
  for (const auto& [series, value] : wanted) EXPECT_THAT(samples, Contains(Pair(series, value)));
}

TEST_F(MetricsTest, StepsThatAreNotAppliedAreCountedByReason) {
  const auto run = metrics_.AddRun(Labels("a"));
  const auto close = [&](Outcome outcome, const char* reason, const char* series) {
    StepRecord report = Step(7);
    report.outcome = outcome, report.reason = reason;
    run->OnStep(report);
    EXPECT_THAT(Samples(), Contains(Pair(series, "1")));
  };
  close(Outcome::kAborted, "disagreement", "ballast_steps_aborted_total{reason=\"disagreement\",run_id=\"a\"}");
  close(Outcome::kPartial, "a reason nobody listed", "ballast_steps_partial_total{reason=\"other\",run_id=\"a\"}");
  close(Outcome::kSkipped, "overflow", "ballast_steps_skipped_total{reason=\"overflow\",run_id=\"a\"}");
  EXPECT_THAT(Samples(), Contains(Pair("ballast_steps_applied_total{run_id=\"a\"}", "0")));
}

TEST_F(MetricsTest, WhatATrainerDiscardsIsNoNonFiniteGradient) {
  const auto run = metrics_.AddRun(Labels("a"));
  StepRecord report = Step(1);
  run->OnStep(report);
  report.outcome = Outcome::kSkipped, report.reason = "discarded";
  run->OnStep(report);
  EXPECT_EQ(Samples()["ballast_gradients_nonfinite_total{run_id=\"a\"}"], "1");
}

TEST_F(MetricsTest, NonFiniteValuesNeverShow) {
  const auto run = metrics_.AddRun(Labels("a"));
  run->OnStep(Step(1));
  StepRecord report = Step(2);
  report.grad_norm = report.seconds = report.learning_rate = kNan;
  report.loss = std::numeric_limits<double>::infinity();
  report.tensor_rms = {kNan, std::numeric_limits<double>::infinity()};
  report.layers[0] = {.rms_ratio = kNan, .update_to_weight_ratio = kNan, .gradient_norm = kNan};
  run->OnStep(report);
  const auto samples = Samples();
  for (const auto& [series, value] : samples) {
    EXPECT_THAT(value, ::testing::AllOf(Not("Nan"), Not("nan"), Not("NaN"), Not("+Inf"), Not("inf"))) << series;
  }
  EXPECT_THAT(samples, Contains(Pair("ballast_gradient_norm{run_id=\"a\"}", "4"))) << "the last finite value stays";
  EXPECT_THAT(samples, Contains(Pair("ballast_rms_ratio{layer=\"embed\",run_id=\"a\"}", "1.5")));
  EXPECT_THAT(samples, Contains(Pair("ballast_rms_ratio_distribution_count{run_id=\"a\"}", "3")));
}

TEST_F(MetricsTest, RecentMaxOutlivesItsStepByAMinute) {
  const auto run = metrics_.AddRun(Labels("a"));
  const std::string series = "ballast_rms_ratio_recent_max{layer=\"embed\",run_id=\"a\"}";
  StepRecord spike = Step(1);
  spike.layers[0].rms_ratio = 9;
  run->OnStep(spike);
  now_s_ += 30;
  run->OnStep(Step(2));
  EXPECT_EQ(Samples()[series], "9");
  now_s_ += 31;
  EXPECT_EQ(Samples()[series], "1.5");
  now_s_ += 3600;
  EXPECT_EQ(Samples()[series], "1.5") << "the last step's value however old";
}

TEST_F(MetricsTest, TrafficIsCounted) {
  const auto run = metrics_.AddRun(Labels("a"));
  run->OnReceived("grpc", 100);
  run->OnReceived("shm", 50);
  run->OnSent("grpc", 7);
  run->OnDuplicateChunk(true);
  run->OnRejectedChunk("bounds");
  run->OnRanks(1, 2);
  run->OnReconnect(0);
  run->OnWaitCaused(0, 1.5);
  metrics_.OnRpcStarted("/ballast.v1.TrainerService/Train");
  metrics_.OnRpcHandled("Train", "ABORTED", 0.5);
  metrics_.OnRpcHandled("/grpc.health.v1.Health/Check", "a code nobody knows", 0.5);
  for (const int delta : {2, -1}) metrics_.OnStreams(delta);
  metrics_.OnAdmissionRejected("memory");
  metrics_.SetMemory("cpu", {.weights = 10, .staging = 5}, 100);
  metrics_.SetMemory("cuda:0", {.momentum = 3}, 200);
  const std::map<std::string, std::string> wanted = {
      {"ballast_received_bytes_total{run_id=\"a\",transport=\"grpc\"}", "100"},
      {"ballast_received_bytes_total{run_id=\"a\",transport=\"shm\"}", "50"},
      {"ballast_rank_wait_caused_seconds_total{rank=\"0\",run_id=\"a\"}", "1.5"},
      {"ballast_chunks_received_total{run_id=\"a\"}", "2"},
      {"ballast_sent_bytes_total{run_id=\"a\",transport=\"grpc\"}", "7"},
      {"ballast_chunks_duplicate_total{match=\"same\",run_id=\"a\"}", "1"},
      {"ballast_chunks_rejected_total{reason=\"bounds\",run_id=\"a\"}", "1"},
      {"ballast_run_ranks{run_id=\"a\"}", "1"},
      {"ballast_run_ranks_expected{run_id=\"a\"}", "2"},
      {"ballast_rank_reconnects_total{rank=\"0\",run_id=\"a\"}", "1"},
      {"ballast_rpc_started_total{method=\"Train\"}", "1"},
      {"ballast_rpc_handled_total{code=\"ABORTED\",method=\"Train\"}", "1"},
      {"ballast_rpc_handled_total{code=\"UNKNOWN\",method=\"other\"}", "1"},
      {"ballast_streams", "1"},
      {"ballast_admission_rejected_total{reason=\"memory\"}", "1"},
      {"ballast_host_memory_used_bytes{device=\"cpu\",kind=\"weights\"}", "10"},
      {"ballast_host_memory_limit_bytes{device=\"cpu\"}", "100"},
      {"ballast_gpu_memory_used_bytes{device=\"cuda:0\",kind=\"momentum\"}", "3"}};
  for (const auto& [series, value] : wanted) EXPECT_THAT(Samples(), Contains(Pair(series, value)));
}

TEST_F(MetricsTest, SeriesOfAnEndedRunStayAMinute) {
  auto ended = metrics_.AddRun(Labels("a"));
  const auto stays = metrics_.AddRun(Labels("b"));
  ended->OnStep(Step(1));
  stays->OnStep(Step(1));
  ended.reset();
  now_s_ += 59;
  auto samples = Samples();
  EXPECT_EQ(samples["ballast_run_state{run_id=\"a\",state=\"ended\"}"], "1");
  EXPECT_EQ(samples["ballast_steps_applied_total{run_id=\"a\"}"], "1");
  EXPECT_EQ(samples["ballast_runs{state=\"waiting\"}"], "1") << "it is no run any more";
  now_s_ += 1;
  const std::string exposition = metrics_.Serialize();
  EXPECT_THAT(exposition, Not(HasSubstr("run_id=\"a\"")));
  EXPECT_THAT(exposition, HasSubstr("run_id=\"b\""));
}

TEST_F(MetricsTest, ARunWithTheIdOfAnEndedOneStartsAtZero) {
  auto run = metrics_.AddRun(Labels("a"));
  run->OnStep(Step(1));
  run.reset();
  run = metrics_.AddRun(Labels("a", {"other"}));
  now_s_ += 1000;
  const auto samples = Samples();
  EXPECT_THAT(samples, Contains(Pair("ballast_steps_applied_total{run_id=\"a\"}", "0")));
  EXPECT_THAT(samples, Not(Contains(Key(HasSubstr("layer=\"h.0\"")))));
}

TEST_F(MetricsTest, ARunMayBeginBeforeItsPredecessorIsLetGo) {
  auto before = metrics_.AddRun(Labels("a"));
  before->OnStep(Step(1));
  const auto after = metrics_.AddRun(Labels("a"));
  after->OnState("training");
  after->OnStep(Step(2));
  before->OnReplaced();
  EXPECT_EQ(Samples()["ballast_runs{state=\"waiting\"}"], "0");  // fails where a series is there twice
  before.reset();
  now_s_ += 1000;
  after->OnStep(Step(3));
  const auto samples = Samples();
  EXPECT_THAT(samples, Contains(Pair("ballast_steps_applied_total{run_id=\"a\"}", "3")));
  EXPECT_THAT(samples, Contains(Pair("ballast_run_state{run_id=\"a\",state=\"training\"}", "1")));
  EXPECT_THAT(samples, Contains(Pair("ballast_runs{state=\"training\"}", "1")));
}

TEST_F(MetricsTest, SeriesOfARunAreAsManyAsAdmissionCounts) {
  std::vector<std::string> layers;
  for (int i = 0; i < 64; ++i) layers.push_back(absl::StrCat("h.", i));
  const size_t before = Samples().size();
  const auto run = metrics_.AddRun(Labels("a", layers));
  run->OnStep(Step(1, layers.size()));
  SayTheRest(run.get());
  EXPECT_EQ(Samples().size() - before, Metrics::SeriesOfRun(Labels("a", layers).shape()));
}

// Bounds far above what it takes (of 16 such runs), so that only another order of growth fails here.
TEST_F(MetricsTest, ALargeRunIsCheapToReportAndToShow) {
  std::vector<std::string> layers;
  for (int i = 0; i < 64; ++i) layers.push_back(absl::StrCat("h.", i));
  std::vector<std::unique_ptr<RunMetrics>> runs;
  StepRecord report = Step(1, layers.size());
  report.tensor_rms.assign(20000, 1.3);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 16; ++i) {
    runs.push_back(metrics_.AddRun(Labels(absl::StrCat("run-", i), layers)));
    runs.back()->OnStep(report);
  }
  const auto reported = std::chrono::steady_clock::now();
  const std::string exposition = metrics_.Serialize();
  const auto shown = std::chrono::steady_clock::now();
  const std::chrono::duration<double> report_s = reported - start, show_s = shown - reported;
  RecordProperty("report_ms", static_cast<int>(report_s.count() * 1e3));
  RecordProperty("show_ms", static_cast<int>(show_s.count() * 1e3));
  EXPECT_LT(report_s.count(), 20);
  EXPECT_LT(show_s.count(), 20);
  EXPECT_LT(exposition.size(), size_t{2} << 20);
}

TEST_F(MetricsTest, ScrapesGoOnWhileRunsComeStepAndGo) {
  std::atomic<bool> done = false;
  std::thread writer([&] {
    for (uint64_t i = 1; i <= 200; ++i) {
      const auto run = metrics_.AddRun(Labels("a"));
      run->OnState("training");
      run->OnStep(Step(i));
      run->OnReceived("grpc", i);
      metrics_.OnRpcHandled("Train", "OK", 0.1);
    }
    done = true;
  });
  while (!done) EXPECT_THAT(metrics_.Serialize(), HasSubstr("ballast_ready"));
  writer.join();
  EXPECT_EQ(Samples()["ballast_rpc_handled_total{code=\"OK\",method=\"Train\"}"], "200");
}

TEST_F(MetricsTest, PromtoolFindsNothingToSay) {
  if (std::string(BALLAST_PROMTOOL).empty()) {
    GTEST_SKIP() << "promtool is not installed (package prometheus): the exposition is not checked";
  }
  const auto run = metrics_.AddRun(Labels("a"));
  run->OnStep(Step(1));
  metrics_.SetMemory("cpu", {.weights = 1}, 2);
  metrics_.SetMemory("cuda:0", {.weights = 1}, 2);
  FILE* promtool = popen(BALLAST_PROMTOOL " check metrics 2>&1", "w");
  ASSERT_NE(promtool, nullptr);
  const std::string exposition = metrics_.Serialize();
  EXPECT_EQ(fwrite(exposition.data(), 1, exposition.size(), promtool), exposition.size());
  EXPECT_EQ(pclose(promtool), 0) << "see its output above";
}

}  // namespace
}  // namespace ballast
