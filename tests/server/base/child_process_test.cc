#include "server/base/child_process.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>
#include <thread>

#include "tests/server/file_content.h"
#include "tests/server/storage/temporary_folder.h"

namespace ballast {
namespace {

using testing::ContentOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using How = ChildEnd::How;

const auto kGoOn = [] { return false; };

ChildOptions Shell(const std::string& script, double timeout_s = 600, double grace_s = 600) {
  return {.command = {"/bin/sh", "-c", script}, .timeout_s = timeout_s, .grace_s = grace_s};
}

// Nobody is left whose end was not asked for.
void ExpectNoChild() {
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST(ChildProcessTest, ItsExitCodeAndTheEndOfItsStderrAreTold) {
  const ChildEnd good = RunChild(Shell("echo into nothing; exit 0"), kGoOn);
  EXPECT_TRUE(good.ok()) << good.ToString();
  EXPECT_EQ(good.said, "");
  const ChildEnd bad = RunChild(Shell("echo no such bucket >&2; exit 3"), kGoOn);
  EXPECT_EQ(bad.ToString(), "exit code 3");
  EXPECT_EQ(bad.said, "no such bucket\n");
  EXPECT_THAT(RunChild(Shell("kill -SEGV $$"), kGoOn).ToString(), HasSubstr("signal 11"));
  ExpectNoChild();
}

TEST(ChildProcessTest, OfMuchItSaysTheEndIsKept) {
  const ChildEnd end =
      RunChild(Shell("i=0; while [ $i -lt 20000 ]; do echo line $i >&2; i=$((i+1)); done; exit 1"), kGoOn);
  EXPECT_EQ(end.code, 1);
  EXPECT_LE(end.said.size(), 2000u);
  EXPECT_THAT(end.said, EndsWith("line 19999\n"));
}

TEST(ChildProcessTest, ArgumentsArriveAsTheyAreWithoutAShell) {
  const ChildEnd end =
      RunChild({.command = {"/bin/sh", "-c", "printf %s \"$1\" >&2", "sh", "a b; $(false) {x},'\"\\"}}, kGoOn);
  EXPECT_EQ(end.said, "a b; $(false) {x},'\"\\");
}

TEST(ChildProcessTest, AProgramThatIsNotThereIsSaid) {
  const ChildEnd end = RunChild({.command = {"/nowhere/at/all"}}, kGoOn);
  EXPECT_EQ(end.how, How::kNotStarted);
  EXPECT_THAT(end.ToString(), HasSubstr("No such file"));
  ExpectNoChild();
}

TEST(ChildProcessTest, AtItsTimeLimitTheWholeGroupEnds) {
  const ChildEnd end = RunChild(Shell("sleep 1000 & echo $! >&2; wait", 0.2), kGoOn);
  EXPECT_EQ(end.how, How::kTimedOut);
  EXPECT_THAT(end.ToString(), HasSubstr("its time limit"));
  // The grandchild, which init, or nobody, has reaped by now, or is about to.
  const pid_t grandchild = std::stoi(end.said);
  while (kill(grandchild, 0) == 0) {
    if (ContentOf("/proc/" + std::to_string(grandchild) + "/stat").find(") Z ") != std::string::npos) break;
    std::this_thread::yield();
  }
  ExpectNoChild();
}

TEST(ChildProcessTest, OneThatDoesNotHeedSigtermIsKilled) {
  const ChildEnd end = RunChild(Shell("trap '' TERM; while :; do sleep 0.01; done", 0.2, 0.2), kGoOn);
  EXPECT_EQ(end.how, How::kTimedOut);
  ExpectNoChild();
}

TEST(ChildProcessTest, WhatItLeavesRunningEndsWithIt) {
  // The one that is left holds stderr open: who waited for its end would wait for 1000 s.
  const ChildEnd end = RunChild(Shell("sleep 1000 & exit 0"), kGoOn);
  EXPECT_TRUE(end.ok()) << end.ToString();
  EXPECT_LT(end.seconds, 500);
}

TEST(ChildProcessTest, ItIsEndedWhenItIsNotWantedAnyMore) {
  int asked = 0;
  const ChildEnd end = RunChild(Shell("sleep 1000"), [&] { return ++asked > 2; });
  EXPECT_EQ(end.how, How::kStopped);
  ExpectNoChild();
}

TEST(ChildProcessTest, ItHasNoDescriptorAndNoBlockedSignalOfOurs) {
  const testing::TemporaryFolder folder;
  const int inherited = open(folder.path().c_str(), O_RDONLY);  // without O_CLOEXEC
  ASSERT_GE(inherited, 3);
  sigset_t blocked, before;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &blocked, &before);
  const ChildEnd end = RunChild(
      Shell("for fd in /proc/$$/fd/*; do readlink $fd >&2; done; exec grep SigBlk /proc/self/status >&2"), kGoOn);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  close(inherited);
  EXPECT_THAT(end.said, Not(HasSubstr(folder.path())));
  EXPECT_THAT(end.said, HasSubstr("/dev/null"));
  EXPECT_THAT(end.said, HasSubstr("SigBlk:\t0000000000000000"));
}

TEST(ChildProcessTest, WhetherAProgramCanBeRunIsKnownBefore) {
  const testing::TemporaryFolder folder;
  const std::string file = folder.path() + "/program";
  EXPECT_TRUE(CheckProgram("/bin/sh").ok());
  EXPECT_TRUE(absl::IsNotFound(CheckProgram(file)));
  EXPECT_TRUE(absl::IsFailedPrecondition(CheckProgram(folder.path())));
  std::ofstream(file) << "#!/bin/sh\n";
  const absl::Status status = CheckProgram(file);
  EXPECT_TRUE(absl::IsPermissionDenied(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr(file));
}

}  // namespace
}  // namespace ballast
