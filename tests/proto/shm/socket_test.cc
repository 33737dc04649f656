#include "proto/shm/socket.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"

#include "tests/eventually.h"
#include "tests/proto/shm/pair.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using testing::ShmPair;

class ShmSocketTest : public ::testing::Test {
 protected:
  ~ShmSocketTest() override { unlink(path_.c_str()); }
  // Both ends of a connection.
  void Join() {
    if (listener_.fd() < 0) listener_ = ShmSocket::Listen(path_).value();
    trainer_ = ShmSocket::Connect(path_).value();
    daemon_ = listener_.Accept().value();
  }

  const std::string path_ = absl::StrCat(::testing::TempDir(), "shm-", getpid(), "-",
                                         ::testing::UnitTest::GetInstance()->current_test_info()->name());
  ShmSocket listener_, trainer_, daemon_;
};

TEST_F(ShmSocketTest, AHelloIsAnsweredWithTheSegment) {
  Join();
  EXPECT_EQ(daemon_.ReceiveHello().status().code(), absl::StatusCode::kUnavailable);
  const auto made = ShmSegment::Create(ShmPair::kShape).value();
  made->gradient_slots()[0] = std::byte{42};
  // The answer may be there before the question is sent: one thread plays both.
  ASSERT_TRUE(daemon_.Answer({.shape = made->shape()}, {made->fd()}).ok());
  ShmHello hello;
  hello.token = {'s', 'e', 'c', 'r', 'e', 't'};
  const auto mapped = trainer_.Ask(hello, 10);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_EQ((*mapped)->shape(), ShmPair::kShape);
  EXPECT_EQ((*mapped)->gradient_slots()[0], std::byte{42});
  const auto heard = daemon_.ReceiveHello();
  ASSERT_TRUE(heard.ok()) << heard.status();
  EXPECT_EQ(heard->token, hello.token);
  EXPECT_FALSE(heard->takes_gpu);
}

TEST_F(ShmSocketTest, ATrainerOnAGpuGetsTwoDescriptorsOrTheReason) {
  Join();
  ShmShape shape = ShmPair::kShape;
  shape.gradient_slot_bytes = shape.weight_slot_bytes = 512;
  const auto in_segment = ShmSegment::Create(shape).value();
  shape.on_gpu = 1;
  const auto made = ShmSegment::Create(shape).value();
  ShmGpuHello hello;
  hello.token = {'s', 'e', 'c', 'r', 'e', 't'};
  const int memory = memfd_create("gpu", MFD_CLOEXEC);
  ASSERT_TRUE(daemon_.Answer({.shape = shape}, {made->fd(), memory}).ok());
  const auto on_gpu = trainer_.AskForGpu(hello, 10);
  ASSERT_TRUE(on_gpu.ok()) << on_gpu.status();
  EXPECT_GE(on_gpu->gpu_memory.fd(), 0);
  EXPECT_EQ(on_gpu->why_none, "");
  const auto heard = daemon_.ReceiveHello();
  ASSERT_TRUE(heard.ok()) << heard.status();
  EXPECT_TRUE(heard->takes_gpu && heard->token == hello.token);

  ShmGrant grant{.shape = in_segment->shape()};
  std::string("no GPU here").copy(grant.message.data(), grant.message.size());
  ASSERT_TRUE(daemon_.Answer(grant, {in_segment->fd()}).ok());
  const auto on_host = trainer_.AskForGpu(hello, 10);
  ASSERT_TRUE(on_host.ok()) << on_host.status();
  EXPECT_LT(on_host->gpu_memory.fd(), 0);
  EXPECT_EQ(on_host->why_none, "no GPU here");

  for (const bool both : {false, true}) {  // not what the shape says
    const int fds[] = {both ? in_segment->fd() : made->fd(), memory};
    ASSERT_TRUE(daemon_.Answer({.shape = both ? in_segment->shape() : shape}, absl::MakeSpan(fds, both ? 2 : 1)).ok());
    EXPECT_THAT(std::string(trainer_.AskForGpu(hello, 10).status().message()), HasSubstr("did not come"));
  }
  close(memory);
}

TEST_F(ShmSocketTest, ARefusalComesWithItsReason) {
  Join();
  ShmGrant grant{.code = static_cast<uint32_t>(absl::StatusCode::kNotFound)};
  std::string("no such session").copy(grant.message.data(), grant.message.size());
  ASSERT_TRUE(daemon_.Answer(grant, {}).ok());
  const absl::Status refused = trainer_.Ask({}, 10).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(refused.message(), "no such session");
}

TEST_F(ShmSocketTest, AGrantWithoutASegmentAndASilentDaemonAreErrors) {
  Join();
  EXPECT_THAT(std::string(trainer_.Ask({}, 0.01).status().message()), HasSubstr("does not answer"));
  ASSERT_TRUE(daemon_.Answer({.shape = ShmPair::kShape}, {}).ok());
  EXPECT_THAT(std::string(trainer_.Ask({}, 10).status().message()), HasSubstr("did not come"));
  daemon_ = ShmSocket();
  EXPECT_FALSE(trainer_.Ask({}, 10).ok());
}

std::atomic<int> signals = 0;

TEST_F(ShmSocketTest, SignalsDoNotEndTheWaitForAnAnswer) {
  Join();
  struct sigaction counts {};
  counts.sa_handler = [](int) { ++signals; };
  sigaction(SIGUSR1, &counts, nullptr);
  absl::Status answer;
  std::atomic<bool> answered = false;
  std::thread asks([&] {
    answer = trainer_.Ask({}, 60).status();
    answered = true;
  });
  EXPECT_TRUE(Soon([&] { return daemon_.ReceiveHello().ok(); }));
  EXPECT_TRUE(Soon([&] {
    pthread_kill(asks.native_handle(), SIGUSR1);
    return signals > 10 || answered;
  }));
  ASSERT_TRUE(daemon_.Answer({.code = static_cast<uint32_t>(absl::StatusCode::kNotFound)}, {}).ok());
  asks.join();
  EXPECT_EQ(answer.code(), absl::StatusCode::kNotFound) << answer;
}

TEST_F(ShmSocketTest, AConnectionWithoutAHelloIsRefused) {
  Join();
  ASSERT_EQ(send(trainer_.fd(), "hello", 5, 0), 5);
  EXPECT_THAT(std::string(daemon_.ReceiveHello().status().message()), HasSubstr("no client of this version"));
  const std::string long_one(sizeof(ShmHello) + 100, 'x');
  ASSERT_EQ(send(trainer_.fd(), long_one.data(), long_one.size(), 0), static_cast<ssize_t>(long_one.size()));
  EXPECT_EQ(daemon_.ReceiveHello().status().code(), absl::StatusCode::kInvalidArgument);
  trainer_ = ShmSocket();
  EXPECT_EQ(daemon_.ReceiveHello().status().code(), absl::StatusCode::kInvalidArgument);
}

// Sends these bytes with so many descriptors.
void SendWith(int socket, const void* bytes, size_t size, size_t descriptors) {
  iovec part{.iov_base = const_cast<void*>(bytes), .iov_len = size};
  std::vector<char> room(CMSG_SPACE(descriptors * sizeof(int)));
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = room.data();
  message.msg_controllen = room.size();
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(descriptors * sizeof(int));
  const std::vector<int> sent(descriptors, socket);
  std::memcpy(CMSG_DATA(header), sent.data(), descriptors * sizeof(int));
  ASSERT_EQ(sendmsg(socket, &message, 0), static_cast<ssize_t>(size));
}

size_t OpenDescriptors() {
  const std::filesystem::directory_iterator open("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(open), end(open)));
}

TEST_F(ShmSocketTest, DescriptorsThatNobodyAskedForAreClosed) {
  Join();
  const size_t before = OpenDescriptors();
  for (const size_t descriptors : {1, 2, 3, 100}) {
    const ShmHello hello;
    SendWith(trainer_.fd(), &hello, sizeof hello, descriptors);
    EXPECT_TRUE(daemon_.ReceiveHello().ok());
    EXPECT_EQ(OpenDescriptors(), before) << descriptors << " with a hello";
    SendWith(trainer_.fd(), "x", 1, descriptors);
    EXPECT_FALSE(daemon_.ReceiveHello().ok());
    EXPECT_EQ(OpenDescriptors(), before) << descriptors << " with a byte";
    SendWith(trainer_.fd(), "", 0, descriptors);
    EXPECT_FALSE(daemon_.ReceiveHello().ok());
    EXPECT_EQ(OpenDescriptors(), before) << descriptors << " with nothing";
    const ShmGrant grant{.shape = ShmPair::kShape};
    SendWith(daemon_.fd(), &grant, sizeof grant, descriptors);
    const auto asked = trainer_.Ask({}, 10);
    EXPECT_FALSE(asked.ok()) << "a socket is no segment";
    EXPECT_EQ(OpenDescriptors(), before) << descriptors << " with a grant";
    ASSERT_TRUE(daemon_.ReceiveHello().ok());
  }
}

TEST_F(ShmSocketTest, EachEndNoticesTheOthers) {
  Join();
  EXPECT_FALSE(daemon_.HungUp());
  EXPECT_FALSE(trainer_.HungUp());
  trainer_ = ShmSocket();
  EXPECT_TRUE(daemon_.HungUp());
  Join();
  daemon_.Shutdown();
  EXPECT_TRUE(trainer_.HungUp());
}

TEST_F(ShmSocketTest, OnlyItsOwnerMayOpenIt) {
  Join();
  struct stat found {};
  ASSERT_EQ(stat(path_.c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0600u);
  const auto peer = daemon_.Peer();
  ASSERT_TRUE(peer.ok()) << peer.status();
  EXPECT_EQ(peer->uid, geteuid());
  EXPECT_EQ(peer->pid, getpid());
}

TEST_F(ShmSocketTest, TheDaemonsUserAndRootMayShareMemory) {
  EXPECT_TRUE(MayShareMemory(1000, 1000));
  EXPECT_TRUE(MayShareMemory(0, 1000));
  EXPECT_FALSE(MayShareMemory(1001, 1000));
  EXPECT_FALSE(MayShareMemory(1000, 0));
  EXPECT_FALSE(MayShareMemory(65534, 1000));  // a user of another namespace
}

TEST_F(ShmSocketTest, TheSocketOfADeadDaemonIsReplacedAndALivingOnesIsNot) {
  ShmSocket first = ShmSocket::Listen(path_).value();
  EXPECT_FALSE(ShmSocket::IsLeft(path_));
  EXPECT_EQ(ShmSocket::Listen(path_).status().code(), absl::StatusCode::kAlreadyExists);
  first = ShmSocket();
  EXPECT_TRUE(ShmSocket::Listen(path_).ok());
}

TEST_F(ShmSocketTest, AFileThatIsNoSocketIsLeftAlone) {
  std::ofstream(path_) << "mine";
  EXPECT_THAT(std::string(ShmSocket::Listen(path_).status().message()), HasSubstr("is no socket"));
  EXPECT_FALSE(ShmSocket::Connect(path_).ok());
  std::string content;
  std::ifstream(path_) >> content;
  EXPECT_EQ(content, "mine");
}

TEST_F(ShmSocketTest, NobodyThereAndImpossiblePathsAreErrors) {
  EXPECT_THAT(std::string(ShmSocket::Connect(path_).status().message()), HasSubstr("No such file"));
  EXPECT_EQ(ShmSocket::Connect("").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ShmSocket::Listen(std::string(200, 'x')).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ballast
