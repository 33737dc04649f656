// Links between GPUs by NCCL, on a library that the tests play (fake_nccl.h), and its GPUs (fake_cuda.h).
#include "proto/nccl/nccl_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>

#include <string>
#include <thread>
#include <vector>

#include "absl/strings/escaping.h"

#include "tests/client/transport/nccl_ends.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using Side = NcclLink::Side;

class NcclLinkTest : public NcclEndsTest {};

TEST_F(NcclLinkTest, MovesPiecesOfAnySizeOneWay) {
  const auto [from, to] = Linked();
  const std::string large(kEndBytes / 2, 'l');
  from.Write(0, "first, second");
  from.Write(100, large);
  std::vector<NcclLink::Piece> pieces = {
      {from.at(7), 6}, {from.at(0), 5}, {from.at(1), 0}, {from.at(100), large.size()}};
  ASSERT_TRUE(from.link->Begin(pieces, kLongS).ok());
  pieces = {{to.at(1), 6}, {to.at(51), 5}, {to.at(2), 0}, {to.at(1000), large.size()}};
  ASSERT_TRUE(to.link->Begin(pieces, kLongS).ok());
  ASSERT_TRUE(to.link->AwaitDone(kLongS).ok());
  ASSERT_TRUE(from.link->AwaitDone(kLongS).ok());
  EXPECT_EQ(to.Read(0, 8), std::string("\0second\0", 8));
  EXPECT_EQ(to.Read(50, 7), std::string("\0first\0", 7));
  EXPECT_EQ(to.Read(1000, large.size()), large);
  EXPECT_EQ(nccl_.sent(), nccl_.received());
  EXPECT_EQ(nccl_.received(), static_cast<int64_t>(11 + large.size()));
}

TEST_F(NcclLinkTest, BeginsAgainBeforeTheLastIsDone) {
  constexpr uint64_t kEach = 1000;
  const auto [from, to] = Linked();
  for (uint64_t i = 0; i < 20; ++i) from.Write(i * kEach, std::string(kEach, static_cast<char>('a' + i)));
  nccl_.HoldTransfers(true);
  for (uint64_t i = 0; i < 20; ++i) {
    ASSERT_TRUE(from.link->Begin({{from.at(i * kEach), kEach}}, kLongS).ok());
    ASSERT_TRUE(to.link->Begin({{to.at(i * kEach), kEach}}, kLongS).ok());
  }
  EXPECT_TRUE(nccl_.AwaitHeld());
  EXPECT_FALSE(from.link->Done().value());
  EXPECT_FALSE(to.link->Done().value());
  nccl_.HoldTransfers(false);
  ASSERT_TRUE(from.link->AwaitDone(kLongS).ok());
  ASSERT_TRUE(to.link->AwaitDone(kLongS).ok());
  EXPECT_EQ(to.Read(0, 20 * kEach), from.Read(0, 20 * kEach));
  EXPECT_TRUE(to.link->Done().value());
  EXPECT_TRUE(to.link->AwaitDone(0).ok());
}

TEST_F(NcclLinkTest, TwoLinksOfTheSameGpusMoveBothWays) {
  const auto [from, to] = Linked();
  const auto [back, home] = Linked();  // of GPU 0 too, to 1
  from.Write(0, "there");
  back.Write(0, "again");
  ASSERT_TRUE(home.link->Begin({{home.at(0), 5}}, kLongS).ok());
  ASSERT_TRUE(from.link->Begin({{from.at(0), 5}}, kLongS).ok());
  ASSERT_TRUE(to.link->Begin({{to.at(0), 5}}, kLongS).ok());
  ASSERT_TRUE(back.link->Begin({{back.at(0), 5}}, kLongS).ok());
  for (const NcclEnd* end : {&from, &to, &back, &home}) ASSERT_TRUE(end->link->AwaitDone(kLongS).ok());
  EXPECT_EQ(to.Read(0, 5), "there");
  EXPECT_EQ(home.Read(0, 5), "again");
}

TEST_F(NcclLinkTest, AnEndPerThread) {
  const std::string id = Nccl::Load(FAKE_NCCL).value()->MakeId().value();
  const auto use = [&](Side side) {
    const NcclEnd end = OpenNcclEnd(id, side, 2).value();
    ASSERT_TRUE(end.link->AwaitReady(kLongS).ok());
    if (side == Side::kSends) end.Write(0, std::string(30, 'w'));
    for (uint64_t i = 0; i < 30; ++i) ASSERT_TRUE(end.link->Begin({{end.at(i), 1}}, kLongS).ok());
    ASSERT_TRUE(end.link->AwaitDone(kLongS).ok());
    EXPECT_EQ(end.Read(0, 30), std::string(30, 'w'));
  };
  std::thread other([&] { use(Side::kReceives); });
  use(Side::kSends);
  other.join();
}

TEST_F(NcclLinkTest, LinksProcesses) {
  const std::string id = Nccl::Load(FAKE_NCCL).value()->MakeId().value();
  std::string program = NCCL_SENDER, shown = absl::BytesToHexString(id), sent = "from another process";
  char* const arguments[] = {program.data(), shown.data(), sent.data(), nullptr};
  pid_t sender = 0;
  ASSERT_EQ(posix_spawn(&sender, program.c_str(), nullptr, nullptr, arguments, environ), 0);
  const NcclEnd end = OpenNcclEnd(id, Side::kReceives, 0).value();
  EXPECT_TRUE(end.link->AwaitReady(kLongS).ok());
  EXPECT_TRUE(end.link->Begin({{end.at(0), sent.size()}}, kLongS).ok());
  EXPECT_TRUE(end.link->AwaitDone(kLongS).ok());
  EXPECT_EQ(end.Read(0, sent.size()), sent);
  EXPECT_EQ(nccl_.received(), static_cast<int64_t>(sent.size()));
  EXPECT_EQ(nccl_.sent(), 0);
  int status = 0;
  ASSERT_EQ(waitpid(sender, &status, 0), sender);
  EXPECT_EQ(status, 0);
}

TEST_F(NcclLinkTest, WaitsNoLongerThanToldForTheOtherEnd) {
  const auto nccl = Nccl::Load(FAKE_NCCL).value();
  const NcclEnd alone = OpenNcclEnd(nccl->MakeId().value(), Side::kSends, 0).value();
  const absl::Status late = alone.link->AwaitReady(kShortS);
  EXPECT_TRUE(absl::IsDeadlineExceeded(late)) << late;
  EXPECT_EQ(late.message(), "NCCL did not connect both ends in 0.05 s");
  EXPECT_TRUE(absl::IsDeadlineExceeded(alone.link->Begin({{alone.at(0), 1}}, 0)));
  EXPECT_TRUE(alone.link->Done().status().ok());
}

TEST_F(NcclLinkTest, TheFirstBeginIsTakenOnceTheOtherEndBeginsToo) {
  const auto [from, to] = Linked();
  ASSERT_TRUE(from.link->Begin({{from.at(0), 1}}, kLongS).ok());
  const absl::Status late = from.link->Begin({{from.at(0), 1}}, kShortS);
  EXPECT_TRUE(absl::IsDeadlineExceeded(late)) << late;
  EXPECT_THAT(late.message(), HasSubstr("NCCL has not taken what was begun before"));
  EXPECT_FALSE(from.link->Done().value());
  ASSERT_TRUE(to.link->Begin({{to.at(0), 1}}, kLongS).ok());
  EXPECT_TRUE(from.link->AwaitDone(kLongS).ok());
  EXPECT_TRUE(to.link->AwaitDone(kLongS).ok());
}

TEST_F(NcclLinkTest, WhatIsNotTakenIsNotDone) {
  const auto [from, to] = Linked();
  nccl_.HoldLaunches(true);
  ASSERT_TRUE(from.link->Begin({{from.at(0), 1}}, kLongS).ok());
  ASSERT_TRUE(to.link->Begin({{to.at(0), 1}}, kLongS).ok());
  EXPECT_FALSE(from.link->Done().value());
  EXPECT_FALSE(to.link->Done().value());
  EXPECT_EQ(cuda_.live().works, 0);
  nccl_.HoldLaunches(false);
  EXPECT_TRUE(from.link->AwaitDone(kLongS).ok());
  EXPECT_TRUE(to.link->AwaitDone(kLongS).ok());
}

TEST_F(NcclLinkTest, StopEndsAWaitAndThoseToCome) {
  const NcclEnd alone = OpenNcclEnd(Nccl::Load(FAKE_NCCL).value()->MakeId().value(), Side::kSends, 0).value();
  std::thread stopper([&] { alone.link->Stop(); });
  EXPECT_TRUE(absl::IsCancelled(alone.link->AwaitReady(kLongS)));
  stopper.join();
  EXPECT_TRUE(absl::IsCancelled(alone.link->AwaitDone(kLongS)));
  EXPECT_TRUE(absl::IsCancelled(alone.link->Begin({{alone.at(0), 1}}, kLongS)));
}

}  // namespace
}  // namespace ballast
