#include "server/base/file_watcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "tests/certificates.h"
#include "tests/eventually.h"

namespace ballast {
namespace {

constexpr absl::Duration kWatcherLooksEvery = absl::Milliseconds(1);

TEST(FileWatcherTest, AFileThatIsReplacedOrGoneIsToldOf) {
  const TestCertificates files;
  FileWatcher watcher({files.Write("a", "1", 0644), files.Write("b", "1", 0644)}, kWatcherLooksEvery);
  std::atomic<int> told = 0, looks = 0;
  watcher.Start([&] { ++told; }, [&] { ++looks; });
  EXPECT_SOON(looks.load() > 5, true);
  EXPECT_EQ(told, 0);
  files.Write("b", "1", 0644);  // of the same text, and another file
  EXPECT_SOON(told.load(), 1);
  std::filesystem::remove(files.Path("a"));
  EXPECT_SOON(told.load(), 2);
}

TEST(FileWatcherTest, WhatChangesWhileItIsReadIsToldOfAgain) {
  const TestCertificates files;
  FileWatcher watcher({files.Write("a", "1", 0644)}, kWatcherLooksEvery);
  std::atomic<int> torn = 0, whole = 0;
  watcher.Start([&] {
    if (torn == 0) files.Write("a", "three", 0644);
    watcher.Steady() ? ++whole : ++torn;
  });
  files.Write("a", "22", 0644);
  EXPECT_SOON(whole.load(), 1);
  EXPECT_EQ(torn, 1);
}

TEST(FileWatcherTest, WhatChangesBetweenTheFirstLookAndTheStartIsToldOf) {
  const TestCertificates files;
  FileWatcher watcher({files.Write("a", "1", 0644)}, kWatcherLooksEvery);
  files.Write("a", "2", 0644);
  std::atomic<int> told = 0;
  watcher.Start([&] { ++told; });
  EXPECT_SOON(told.load(), 1);
}

}  // namespace
}  // namespace ballast
