// What becomes of a link between GPUs when the other end, NCCL or the GPU fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/nccl/nccl_link.h"

#include "tests/client/in_fork.h"
#include "tests/client/transport/nccl_ends.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMuch = kEndBytes / 2;  // no socket takes it
constexpr int kNcclInternal = 3, kCudaUnknown = 999;

class NcclFailuresTest : public NcclEndsTest {};

TEST_F(NcclFailuresTest, TheOtherEndsEndIsUnavailable) {
  for (const bool sender_ends : {false, true}) {
    auto [from, to] = Linked();
    ASSERT_TRUE(from.link->Begin({{from.at(0), kMuch}}, kLongS).ok());
    nccl_.HoldTransfers(true);
    ASSERT_TRUE(to.link->Begin({{to.at(0), kMuch}}, kLongS).ok());
    EXPECT_TRUE(nccl_.AwaitHeld());
    (sender_ends ? from : to).link.reset();
    nccl_.HoldTransfers(false);
    const NcclEnd& left = sender_ends ? to : from;
    const absl::Status gone = left.link->AwaitDone(kLongS);
    EXPECT_TRUE(absl::IsUnavailable(gone)) << gone;
    EXPECT_THAT(gone.message(), HasSubstr("NCCL: remote process exited or there was a network error (error 6)"));
    EXPECT_EQ(left.link->Done().status(), gone);
    EXPECT_EQ(left.link->Begin({{left.at(0), 1}}, kLongS), gone);
  }
}

TEST_F(NcclFailuresTest, TheOtherEndsEndMayNeverBeNoticed) {
  nccl_.Silent(true);
  auto [from, to] = Linked();
  ASSERT_TRUE(from.link->Begin({{from.at(0), 10}}, kLongS).ok());
  ASSERT_TRUE(to.link->Begin({{to.at(0), 10}, {to.at(10), kMuch}}, kLongS).ok());
  from.link.reset();
  const absl::Status late = to.link->AwaitDone(kShortS);
  EXPECT_TRUE(absl::IsDeadlineExceeded(late)) << late;
  EXPECT_EQ(late.message(), "NCCL moved no bytes in 0.05 s");
  EXPECT_FALSE(to.link->Done().value());
}

TEST_F(NcclFailuresTest, StopEndsAWaitForATransfer) {
  const auto [from, to] = Linked();
  ASSERT_TRUE(from.link->Begin({{from.at(0), kMuch}}, kLongS).ok());
  std::thread stopper([link = from.link.get()] { link->Stop(); });
  EXPECT_TRUE(absl::IsCancelled(from.link->AwaitDone(kLongS)));
  stopper.join();
}

TEST_F(NcclFailuresTest, ABrokenNetworkIsUnavailable) {
  const auto [from, to] = Linked();
  ASSERT_TRUE(from.link->Done().status().ok());
  ASSERT_TRUE(from.link->Begin({{from.at(0), kMuch}}, kLongS).ok());
  nccl_.Break();
  for (const NcclEnd* end : {&from, &to}) {
    EXPECT_TRUE(absl::IsUnavailable(end->link->AwaitDone(kLongS)));
    EXPECT_TRUE(absl::IsUnavailable(end->link->AwaitReady(kLongS)));
    EXPECT_TRUE(absl::IsUnavailable(end->link->Done().status())) << end->link->Done().status();
  }
}

TEST_F(NcclFailuresTest, EndsThatDisagreeOnSizesFail) {
  const auto [from, to] = Linked();
  ASSERT_TRUE(from.link->Begin({{from.at(0), 10}}, kLongS).ok());
  ASSERT_TRUE(to.link->Begin({{to.at(0), 11}}, kLongS).ok());
  const absl::Status other = to.link->AwaitDone(kLongS);
  EXPECT_TRUE(absl::IsInternal(other)) << other;
  EXPECT_THAT(other.message(), HasSubstr("the other end sends 10 bytes where this one receives 11"));
}

TEST_F(NcclFailuresTest, MemoryOfAnotherGpuIsRefused) {
  const auto [from, to] = Linked();
  ASSERT_TRUE(from.link->Begin({{to.at(0), 10}}, kLongS).ok());
  ASSERT_TRUE(to.link->Begin({{to.at(0), 10}}, kLongS).ok());
  const absl::Status refused = from.link->AwaitDone(kLongS);
  EXPECT_TRUE(absl::IsInternal(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("illegal memory access"));
}

TEST_F(NcclFailuresTest, AnIdOfNobodyAndOneOfAnotherSize) {
  const absl::Status empty = OpenNcclEnd("", NcclLink::Side::kSends, 0).status();
  EXPECT_TRUE(absl::IsInvalidArgument(empty)) << empty;
  EXPECT_EQ(empty.message(), "an id of NCCL's has 128 bytes, not 0");
  const std::string nobodys(Nccl::kIdBytes, 'n');
  const NcclEnd end = OpenNcclEnd(nobodys, NcclLink::Side::kSends, 0).value();
  EXPECT_TRUE(absl::IsUnavailable(end.link->AwaitReady(kLongS)));
}

TEST_F(NcclFailuresTest, EndsWhileItConnectsAndWhileATransferWaits) {
  {
    const NcclEnd alone =
        OpenNcclEnd(Nccl::Load(FAKE_NCCL).value()->MakeId().value(), NcclLink::Side::kSends, 0).value();
  }
  ExpectNothingLeft("of one that connected");
  auto [from, to] = Linked();
  nccl_.HoldTransfers(true);
  to.Write(0, "before");
  ASSERT_TRUE(from.link->Begin({{from.at(0), 6}}, kLongS).ok());
  ASSERT_TRUE(to.link->Begin({{to.at(0), 6}}, kLongS).ok());
  EXPECT_TRUE(nccl_.AwaitHeld());
  std::thread([link = std::move(from.link)]() mutable { link.reset(); }).join();  // in any thread
  to.link.reset();
  nccl_.HoldTransfers(false);
  EXPECT_EQ(to.Read(0, 6), "before");
  EXPECT_EQ(nccl_.received(), 0);
}

TEST_F(NcclFailuresTest, EachFunctionThatFailsIsNamedAndLeavesNothing) {
  constexpr int kPolls = 10;  // of which a wait makes as many as it likes
  for (const char* function : {"ncclGetVersion", "ncclGetUniqueId", "ncclCommInitRankConfig", "ncclCommGetAsyncError",
                               "ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd", "ncclCommAbort"}) {
    const bool is_polled = function == std::string("ncclCommGetAsyncError");
    for (int n = 1; !is_polled || n <= kPolls; ++n) {
      nccl_.FailCall(function, n, kNcclInternal);
      const absl::Status status = Use();
      ExpectNothingLeft(absl::StrCat(function, " ", n));
      if (!nccl_.failed()) {
        EXPECT_GT(n, 1) << function << " is not called";
        EXPECT_TRUE(status.ok()) << function << " " << n << ": " << status;
        break;
      }
      if (function == std::string("ncclCommAbort")) continue;
      EXPECT_TRUE(absl::IsInternal(status)) << status;
      EXPECT_TRUE(absl::StartsWith(status.message(), absl::StrCat(function, ": internal error"))) << n << status;
    }
  }
}

TEST_F(NcclFailuresTest, EachCallOfTheDriversThatFailsLeavesNothing) {
  const int64_t before = cuda_.calls();
  ASSERT_TRUE(Use().ok());
  const int64_t used = cuda_.calls() - before;  // more or less: how often a wait asks differs
  for (int64_t n = 1; n <= used; ++n) {
    cuda_.FailCall(n, kCudaUnknown);
    const absl::Status status = Use();
    cuda_.FailCall(0, 0);
    EXPECT_TRUE(status.ok() || absl::IsInternal(status)) << n << ": " << status;
    ExpectNothingLeft(absl::StrCat(n, ": ", status.ToString()));
  }
}

TEST_F(NcclFailuresTest, NoLibraryNoNcclAndAnOldOne) {
  const absl::Status none = Nccl::Load("libnccl-of-nobody.so.2").status();
  EXPECT_TRUE(absl::IsNotFound(none)) << none;
  EXPECT_THAT(none.message(), HasSubstr("there is no NCCL, libnccl-of-nobody.so.2"));
  EXPECT_THAT(none.message(), HasSubstr("pip install nvidia-nccl-cu12"));
  const absl::Status other = Nccl::Load(FAKE_CUDA).status();
  EXPECT_TRUE(absl::IsNotFound(other)) << other;
  EXPECT_THAT(other.message(), HasSubstr("libcuda.so.1 is no NCCL: it has no ncclGetVersion"));
  const absl::Status lacks = Nccl::Load(FAKE_OLD_NCCL).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(lacks)) << lacks;
  EXPECT_THAT(lacks.message(), HasSubstr("is too old, it has no ncclCommInitRankConfig: use 2.27.3 or later"));
  for (const auto& [version, text] :
       {std::pair(22606, "2.26.6"), std::pair(21304, "2.13.4"), std::pair(2804, "2.8.4")}) {
    nccl_.SetVersion(version);
    const absl::Status old = Nccl::Load(FAKE_NCCL).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(old)) << old;
    EXPECT_THAT(old.message(), HasSubstr(absl::StrCat("NCCL ", text, " is too old: use 2.27.3 or later")));
  }
}

TEST_F(NcclFailuresTest, OneThatIsToldToBlockIsRefused) {
  for (const auto& [value, refused] : {std::pair("1", true), std::pair(" 0x1", true), std::pair("0", false)}) {
    setenv("NCCL_COMM_BLOCKING", value, 1);
    const absl::Status loaded = Nccl::Load(FAKE_NCCL).status();
    EXPECT_EQ(absl::IsFailedPrecondition(loaded), refused) << value << ": " << loaded;
    EXPECT_EQ(loaded.ok(), !refused);
  }
  unsetenv("NCCL_COMM_BLOCKING");
}

TEST_F(NcclFailuresTest, ItsIdsDifferAndItsVersionIsTheLibrarys) {
  nccl_.SetVersion(23203);
  const auto nccl = Nccl::Load(FAKE_NCCL).value();
  EXPECT_EQ(nccl->version(), 23203);
  EXPECT_EQ(NcclVersionText(nccl->version()), "2.32.3");
  const std::string id = nccl->MakeId().value();
  EXPECT_EQ(id.size(), Nccl::kIdBytes);
  EXPECT_NE(nccl->MakeId().value(), id);
  EXPECT_TRUE(Nccl::Load("libnccl.so.2").ok());  // by its name, once it is opened
}

TEST_F(NcclFailuresTest, AForkIsRefusedAndItsEndCallsNothing) {
  auto [from, to] = Linked();
  EXPECT_TRUE(HoldsInFork([&, link = &from.link, end = &from] {
    const int64_t calls = nccl_.calls() + cuda_.calls();
    const bool refused = absl::IsFailedPrecondition((*link)->Begin({{end->at(0), 1}}, kLongS)) &&
                         absl::IsFailedPrecondition((*link)->AwaitDone(kLongS)) &&
                         absl::IsFailedPrecondition((*link)->Done().status());
    link->reset();
    return refused && nccl_.calls() + cuda_.calls() == calls;
  }));
  EXPECT_TRUE(from.link->Done().status().ok());
}

TEST_F(NcclFailuresTest, MayEndAfterTheDriver) {
  {
    auto [from, to] = Linked();
    ASSERT_TRUE(from.link->Begin({{from.at(0), kMuch}}, kLongS).ok());
    cuda_.ShutDown();
    EXPECT_FALSE(to.link->Begin({{to.at(0), kMuch}}, kLongS).ok());
  }
  nccl_.Reset();  // nothing was ended
  cuda_.Reset();
}

}  // namespace
}  // namespace ballast
