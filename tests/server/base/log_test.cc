#include "server/base/log.h"

#include <limits>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"
#include "gtest/gtest.h"

#include "server/base/logger.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr int64_t kNow = 1'769'903'999'000'001;  // 2026-01-31T23:59:59.000001Z

class LogTest : public ::testing::Test {
 protected:
  Logger Make(Logger::Format format, LogLevel level = LogLevel::kInfo) {
    return Logger({.level = level,
                   .format = format,
                   .sink = [this](std::string_view line) { lines_.emplace_back(line); },
                   .now_us = [this] { return now_us_; }});
  }
  std::string Line(Logger::Format format, std::vector<LogField> fields, std::string_view event = "step_closed") {
    Make(format).Log(LogLevel::kInfo, event, "step closed", fields);
    return lines_.back();
  }

  int64_t now_us_ = kNow;
  std::vector<std::string> lines_;
};

TEST_F(LogTest, AJsonLineHasItsKeysInOrder) {
  EXPECT_EQ(
      Line(Logger::Format::kJson, {{"err", "no"},
                                   {"extra", true},
                                   {"bytes", uint64_t{18446744073709551615u}},
                                   {"dur_s", 0.1},
                                   {"step", int64_t{-7}},
                                   {"run_id", "a"}}),
      "{\"ts\":\"2026-01-31T23:59:59.000001Z\",\"level\":\"info\",\"event\":\"step_closed\",\"msg\":\"step closed\","
      "\"run_id\":\"a\",\"step\":-7,\"dur_s\":0.1,\"bytes\":18446744073709551615,\"err\":\"no\",\"extra\":true}\n");
}

TEST_F(LogTest, ATextLineReadsWell) {
  EXPECT_EQ(
      Line(Logger::Format::kText, {{"err", "it failed"}, {"step", int64_t{7}}, {"run_id", "a"}, {"empty", ""}}),
      "2026-01-31T23:59:59.000001Z info  step_closed: step closed run_id=a step=7 err=\"it failed\" empty=\"\"\n");
}

TEST_F(LogTest, TextCannotForgeALineOrAField) {
  const std::string line = Line(Logger::Format::kText, {{"err", "a\n2026 error x: y"}, {"peer", "b step=9"}});
  EXPECT_THAT(line, HasSubstr("err=\"a\\n2026 error x: y\""));
  EXPECT_THAT(line, HasSubstr("peer=\"b step=9\""));
  EXPECT_EQ(line.find('\n'), line.size() - 1);
}

// U+202E turns what stands after it; U+009B is a terminal's escape in one character.
TEST_F(LogTest, ATerminalIsToldNothingByAValue) {
  const std::string value = "w\u202e\u009b31m\U000E0041 \u00fc";
  for (const auto format : {Logger::Format::kText, Logger::Format::kJson}) {
    EXPECT_THAT(Line(format, {{"tensor", value}}), HasSubstr("\"w\\u202e\\u009b31m\\udb40\\udc41 \u00fc\""));
  }
}

TEST_F(LogTest, AnyBytesAndNumbersGiveValidJson) {
  std::string every_byte;
  for (int byte = 0; byte < 256; ++byte) every_byte += static_cast<char>(byte);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const std::string line = Line(Logger::Format::kJson,
                                {{"err", every_byte},
                                 {"a", nan},
                                 {"b", -infinity},
                                 {"c", 1e300},
                                 {"d", -0.0},
                                 {"e\"\n", "\"\\\x01\x7f\xff \xC3\xA9"}},
                                every_byte);
  google::protobuf::Struct parsed;
  const auto status = google::protobuf::util::JsonStringToMessage(line, &parsed);
  ASSERT_TRUE(status.ok()) << status << "\n" << line;
  std::string printed;
  ASSERT_TRUE(google::protobuf::util::MessageToJsonString(parsed, &printed).ok());
  EXPECT_THAT(printed, HasSubstr("\"c\":1e+300"));
  EXPECT_THAT(printed, HasSubstr("\"a\":\"nan\""));
  EXPECT_THAT(printed, HasSubstr("\"e\\\"\\n\":\"\\\"\\\\\\u0001\\u007f\xEF\xBF\xBD \xC3\xA9\""));
}

TEST_F(LogTest, LowerLevelsAreDropped) {
  Logger logger = Make(Logger::Format::kText, LogLevel::kWarn);
  logger.Log(LogLevel::kInfo, "a", "a", {});
  logger.Log(LogLevel::kWarn, "b", "b", {});
  logger.Log(LogLevel::kError, "c", "c", {});
  EXPECT_THAT(lines_, SizeIs(2));
}

TEST_F(LogTest, TenLinesASecondAnEventAndTheNextSaysHowManyWereLost) {
  Logger logger = Make(Logger::Format::kJson);
  for (int i = 0; i < 25; ++i) logger.Log(LogLevel::kInfo, "noisy", "noisy", {});
  EXPECT_THAT(lines_, SizeIs(10));
  logger.Log(LogLevel::kInfo, "other", "other", {});
  EXPECT_THAT(lines_, SizeIs(11)) << "events are counted apart";
  now_us_ += 1'000'000;
  logger.Log(LogLevel::kInfo, "noisy", "noisy", {});
  EXPECT_THAT(lines_.back(), HasSubstr("\"suppressed\":15}"));
  logger.Log(LogLevel::kInfo, "noisy", "noisy", {});
  EXPECT_THAT(lines_.back(), ::testing::Not(HasSubstr("suppressed")));
  now_us_ -= 10'000'000;
  for (int i = 0; i < 25; ++i) logger.Log(LogLevel::kInfo, "noisy", "noisy", {});
  EXPECT_THAT(lines_, SizeIs(23)) << "a clock set back neither blocks nor opens the gate";
}

TEST_F(LogTest, WhatIsAuditedIsNeverLeftOut) {
  Logger logger = Make(Logger::Format::kText, LogLevel::kError);
  for (int i = 0; i < 25; ++i) logger.Log(LogLevel::kAudit, "audit", "done", {});
  EXPECT_THAT(lines_, SizeIs(25));
  EXPECT_THAT(lines_.back(), HasSubstr("info  audit: done"));
}

TEST_F(LogTest, LinesOfThreadsStayWhole) {
  absl::Mutex mutex;
  std::vector<std::string> lines;
  Logger logger({.level = LogLevel::kInfo,
                 .format = Logger::Format::kText,
                 .sink =
                     [&](std::string_view line) {
                       absl::MutexLock lock(&mutex);
                       lines.emplace_back(line);
                     },
                 .now_us = [] { return kNow; }});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&logger, t] {
      for (int i = 0; i < 10; ++i) logger.Log(LogLevel::kInfo, std::string(1, static_cast<char>('a' + t)), "m", {});
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(lines, SizeIs(40));
}

TEST(ProcessLogTest, GoesToStderr) {
  ::testing::internal::CaptureStderr();
  ConfigureLog(LogLevel::kInfo, "json");
  Log(LogLevel::kInfo, "process_log_test", "hello", {{"run_id", std::string("a")}});
  const std::string line = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(line, HasSubstr("\"event\":\"process_log_test\",\"msg\":\"hello\",\"run_id\":\"a\"}\n"));
}

}  // namespace
}  // namespace ballast
