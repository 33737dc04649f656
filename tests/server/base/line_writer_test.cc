#include "server/base/line_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

#include "server/base/clock.h"

namespace ballast {
namespace {

// Whether the writer opens the pipe for itself.
class LineWriterTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    ASSERT_EQ(pipe2(ends_.data(), O_CLOEXEC), 0);
    ASSERT_EQ(fcntl(ends_[0], F_SETPIPE_SZ, 8192), 8192);
  }
  void TearDown() override {
    for (const int end : ends_) close(end);
  }
  LineWriter Make() {
    return {ends_[1], GetParam(), [](uint64_t lost) { return absl::StrCat("lost ", lost, "\n"); }};
  }
  // All that is there now.
  std::string Read() {
    std::array<char, 8192> bytes;
    fcntl(ends_[0], F_SETFL, O_NONBLOCK);
    const ssize_t got = read(ends_[0], bytes.data(), bytes.size());
    return got < 0 ? "" : std::string(bytes.data(), static_cast<size_t>(got));
  }

  std::array<int, 2> ends_{};
};

TEST_P(LineWriterTest, WritesLines) {
  LineWriter writer = Make();
  writer.Write("a\n");
  writer.Write("b\n");
  EXPECT_EQ(Read(), "a\nb\n");
}

TEST_P(LineWriterTest, LinesThatNobodyReadsAreLostAndCounted) {
  LineWriter writer = Make();
  const std::string whole = std::string(4095, 'x') + "\n";
  writer.Write(whole);
  writer.Write(whole);
  const double begin_s = MonotonicSeconds();
  for (int line = 0; line < 1000; ++line) writer.Write("lost\n");
  EXPECT_LT(MonotonicSeconds() - begin_s, 20);  // one is waited for; more than this is to wait for each
  EXPECT_EQ(Read(), whole + whole);
  writer.Write("taken\n");
  writer.Write("next\n");
  EXPECT_EQ(Read(), "lost 1000\ntaken\nnext\n");
}

TEST_P(LineWriterTest, ALineThatWasTakenInPartEndsBeforeTheNext) {
  LineWriter writer = Make();
  writer.Write(std::string(10000, 'x') + "\n");
  EXPECT_EQ(Read(), std::string(8192, 'x'));
  writer.Write("next\n");
  EXPECT_EQ(Read(), "\nlost 1\nnext\n");
}

TEST_P(LineWriterTest, OthersWriteAsBefore) {
  LineWriter writer = Make();
  writer.Write("a\n");
  EXPECT_EQ(fcntl(ends_[1], F_GETFL) & O_NONBLOCK, 0);
}

INSTANTIATE_TEST_SUITE_P(Pipes, LineWriterTest, ::testing::Bool(),
                         [](const auto& own) { return own.param ? "Own" : "Shared"; });

}  // namespace
}  // namespace ballast
