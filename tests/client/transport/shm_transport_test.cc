// The trainer's end of the shared-memory transport, against a daemon's end that the test holds.
#include "client/cpp/transport/shm_transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "absl/strings/str_cat.h"

#include "tests/proto/shm/pair.h"

namespace ballast {
namespace {

class ShmTransportTest : public ::testing::Test {
 protected:
  ShmTransportTest() {
    const std::string path = absl::StrCat(::testing::TempDir(), "ballast-shm-transport-", getpid(), ".sock");
    const ShmSocket listener = ShmSocket::Listen(path).value();
    ShmGrant grant;
    grant.shape = segment_->shape();
    std::atomic<bool> made = false;
    std::thread trainer([&] {
      while (!made) {  // on a busy machine the daemon may not answer in time
        auto transport = ShmTransport::Open(path, std::string(16, 't'));
        if (transport.ok()) transport_ = *std::move(transport);
        made = transport_ != nullptr;
      }
    });
    while (!made) {
      if (auto socket = listener.Accept(); socket.ok()) daemon_ = *std::move(socket);
      if (daemon_.ReceiveHello().ok()) daemon_.Answer(grant, {segment_->fd()}).IgnoreError();
    }
    trainer.join();
    unlink(path.c_str());
  }

  const std::shared_ptr<ShmSegment> segment_ = ShmSegment::Create(testing::ShmPair::kShape).value();
  ShmSocket daemon_;
  std::unique_ptr<ShmTransport> transport_;
};

// A reader that never finds its pipe empty would otherwise be taken for a stopped process.
TEST_F(ShmTransportTest, AReaderThatIsBusyBeats) {
  constexpr uint64_t kRecords = 10;
  v1::TrainResponse credit;
  credit.mutable_credit()->set_bytes(7);
  ShmRecordWriter writer(DownPipe(*segment_));
  for (uint64_t i = 0; i < kRecords; ++i) writer.Add({.type = ShmRecord::kMessage}, credit.SerializeAsString());
  ASSERT_TRUE(*writer.Flush());
  const uint64_t before = segment_->control().trainer_beats.value;
  for (uint64_t i = 0; i < kRecords; ++i) {
    v1::TrainResponse response;
    absl::Span<const std::byte> data;
    ASSERT_TRUE(transport_->Read(&response, &data));
    EXPECT_EQ(response.credit().bytes(), 7u);
    EXPECT_EQ(segment_->control().trainer_beats.value, before + i + 1);
  }
}

TEST_F(ShmTransportTest, KnowsThatTheDaemonIsGoneBeforeItsReaderHasLooked) {
  EXPECT_FALSE(transport_->HungUp());
  daemon_ = ShmSocket();
  EXPECT_TRUE(transport_->HungUp());
}

// The client's hello then lies unread in the socket, so the socket reports an error instead of its end.
TEST(ShmTransportOpenTest, ADaemonThatEndsBeforeItAnswersIsNotSaidToBeOfAnotherVersion) {
  const std::string path = absl::StrCat(::testing::TempDir(), "ballast-shm-transport-end-", getpid(), ".sock");
  absl::Status status;
  {
    const ShmSocket listener = ShmSocket::Listen(path).value();
    std::thread trainer([&] { status = ShmTransport::Open(path, std::string(16, 't'), /*patience_s=*/60).status(); });
    ShmSocket daemon;
    while (daemon.fd() < 0) {
      if (auto socket = listener.Accept(); socket.ok()) daemon = *std::move(socket);
    }
    pollfd spoken{.fd = daemon.fd(), .events = POLLIN, .revents = 0};
    EXPECT_EQ(poll(&spoken, 1, 60'000), 1);
    { const ShmSocket ended = std::move(daemon); }
    trainer.join();
  }
  unlink(path.c_str());
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              ::testing::AllOf(::testing::HasSubstr("closed the socket before it answered"),
                               ::testing::HasSubstr("it has just ended, or is of another version")));
}

}  // namespace
}  // namespace ballast
