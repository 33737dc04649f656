#include "proto/shm/record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "tests/proto/shm/pair.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using testing::ShmPair;

class ShmRecordTest : public ::testing::Test {
 protected:
  std::string Body(size_t bytes) {
    std::string body(bytes, '\0');
    for (char& c : body) c = static_cast<char>(random_());
    return body;
  }
  // Writes bytes as they are, as a trainer of bad faith may.
  void Scribble(const void* bytes, size_t count) {
    std::memcpy(pair_.trainer->up_pipe().data(), bytes, count);
    pair_.trainer->control().up_written.value = count;
  }

  ShmPair pair_;
  std::mt19937 random_{5};
  ShmRecordWriter writer_{UpPipe(*pair_.trainer)};
  ShmRecordReader reader_{UpPipe(*pair_.daemon), /*most_body_bytes=*/1 << 16};
  ShmRecord record_;
};

TEST_F(ShmRecordTest, ARecordIsReadAsItWasWritten) {
  EXPECT_FALSE(*reader_.Next(&record_));
  EXPECT_FALSE(reader_.HasMore());
  writer_.Add({.type = ShmRecord::kMessage, .slot = 3, .payload_bytes = 77}, "abc");
  EXPECT_TRUE(*writer_.Flush());
  EXPECT_TRUE(reader_.HasMore());
  ASSERT_TRUE(*reader_.Next(&record_));
  EXPECT_EQ(record_.type, ShmRecord::kMessage);
  EXPECT_EQ(record_.slot, 3u);
  EXPECT_EQ(record_.payload_bytes, 77u);
  EXPECT_EQ(reader_.body(), "abc");
  EXPECT_FALSE(*reader_.Next(&record_));
}

// 32 + b bytes in a pipe of 1024: the ring's end falls at every place of a record.
TEST_F(ShmRecordTest, ARecordMayWrapAtAnyByteOfTheRing) {
  for (int i = 0; i < 4000; ++i) {
    const std::string body = Body(random_() % 97);
    writer_.Add({.type = ShmRecord::kMessage}, body);
    ASSERT_TRUE(*writer_.Flush());
    ASSERT_TRUE(*reader_.Next(&record_));
    ASSERT_EQ(reader_.body(), body) << i;
    ASSERT_EQ(record_.sequence, static_cast<uint64_t>(i));
  }
}

TEST_F(ShmRecordTest, AFullPipeHoldsTheWriterUpAndLosesNothing) {
  int written = 0, read = 0;
  while (*writer_.Flush()) {
    writer_.Add({.type = ShmRecord::kMessage}, std::to_string(written++));
  }
  EXPECT_EQ(pair_.daemon->control().up_written.value, 1024u);
  EXPECT_FALSE(writer_.HasRoom());
  EXPECT_FALSE(writer_.empty());
  while (*reader_.Next(&record_)) EXPECT_EQ(reader_.body(), std::to_string(read++));
  EXPECT_EQ(read, written - 1);
  EXPECT_TRUE(writer_.HasRoom());
  EXPECT_TRUE(*writer_.Flush());
  ASSERT_TRUE(*reader_.Next(&record_));
  EXPECT_EQ(reader_.body(), std::to_string(written - 1));
}

TEST_F(ShmRecordTest, ABodyLongerThanThePipePassesPieceByPiece) {
  const std::string body = Body(1 << 16);
  writer_.Add({.type = ShmRecord::kMessage}, body);
  int pieces = 0;
  for (bool done = false; !done; ++pieces) {
    ASSERT_TRUE(writer_.Flush().ok());
    const auto next = reader_.Next(&record_);
    ASSERT_TRUE(next.ok()) << next.status();
    done = *next;
  }
  EXPECT_GE(pieces, 64);
  EXPECT_EQ(reader_.body(), body);
}

TEST_F(ShmRecordTest, TwoThreadsPassThousandsOfRecords) {
  constexpr int kRecords = 20000;
  std::thread writing([&] {
    for (int i = 0; i < kRecords; ++i) {
      writer_.Add({.type = ShmRecord::kMessage}, std::string(static_cast<size_t>(i % 300), static_cast<char>(i)));
      while (!*writer_.Flush()) std::this_thread::yield();
    }
  });
  for (int i = 0; i < kRecords;) {
    const auto next = reader_.Next(&record_);
    ASSERT_TRUE(next.ok()) << next.status();
    if (!*next) {
      std::this_thread::yield();
      continue;
    }
    ASSERT_EQ(reader_.body(), std::string(static_cast<size_t>(i % 300), static_cast<char>(i)));
    ++i;
  }
  writing.join();
}

struct BadHeader {
  const char* name;
  std::function<void(ShmRecord&)> spoil;
  absl::StatusCode code;
  const char* says;
};

class BadHeaderTest : public ShmRecordTest, public ::testing::WithParamInterface<BadHeader> {};

TEST_P(BadHeaderTest, ABadHeaderIsRefused) {
  ShmRecord record{.type = ShmRecord::kMessage, .body_bytes = 4, .slot = 1, .payload_bytes = 8};
  GetParam().spoil(record);
  Scribble(&record, sizeof record);
  const auto next = reader_.Next(&record_);
  EXPECT_EQ(next.status().code(), GetParam().code) << next.status();
  EXPECT_THAT(std::string(next.status().message()), HasSubstr(GetParam().says));
}

INSTANTIATE_TEST_SUITE_P(
    Header, BadHeaderTest,
    ::testing::Values(
        BadHeader{"Type0", [](auto& r) { r.type = 0; }, absl::StatusCode::kInvalidArgument, "the type 0"},
        BadHeader{"Type4", [](auto& r) { r.type = 4; }, absl::StatusCode::kInvalidArgument, "the type 4"},
        BadHeader{"Body", [](auto& r) { r.body_bytes = 65537; }, absl::StatusCode::kResourceExhausted, "65537 bytes"},
        BadHeader{"HugeBody", [](auto& r) { r.body_bytes = ~0u; }, absl::StatusCode::kResourceExhausted,
                  "larger than 65536"},
        BadHeader{"Sequence", [](auto& r) { r.sequence = 1; }, absl::StatusCode::kDataLoss, "says that it is 1"},
        BadHeader{"NoPayload", [](auto& r) { r.payload_bytes = 0; }, absl::StatusCode::kInvalidArgument, "in slot 1"},
        BadHeader{"NoSlot", [](auto& r) { r.slot = ShmRecord::kNoSlot; }, absl::StatusCode::kInvalidArgument,
                  "payload of 8 bytes"},
        BadHeader{"PayloadOfAnEnd", [](auto& r) { r.type = ShmRecord::kHalfClose; }, absl::StatusCode::kInvalidArgument,
                  "the type 2"},
        BadHeader{"Rest", [](auto& r) { r.zero = 1; }, absl::StatusCode::kInvalidArgument, "no client"}),
    [](const auto& of) { return of.param.name; });

TEST_F(ShmRecordTest, AWriterThatCountsBeyondTheRingIsCaught) {
  for (const uint64_t written : {uint64_t{1025}, ~uint64_t{0}, uint64_t{1} << 63}) {
    pair_.trainer->control().up_written.value = written;
    EXPECT_TRUE(reader_.HasMore());
    EXPECT_EQ(reader_.Next(&record_).status().code(), absl::StatusCode::kDataLoss) << written;
  }
}

TEST_F(ShmRecordTest, AReaderThatCountsBeyondTheWriterIsCaught) {
  writer_.Add({.type = ShmRecord::kMessage}, "abc");
  pair_.daemon->control().up_read.value = 1;
  EXPECT_EQ(writer_.Flush().status().code(), absl::StatusCode::kDataLoss);
}

// The reader's own position is not the one in shared memory.
TEST_F(ShmRecordTest, WhatTheTrainerWritesIntoTheReadersCounterChangesNothing) {
  for (int i = 0; i < 3; ++i) writer_.Add({.type = ShmRecord::kMessage}, std::to_string(i));
  ASSERT_TRUE(*writer_.Flush());
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(*reader_.Next(&record_));
    EXPECT_EQ(reader_.body(), std::to_string(i));
    pair_.trainer->control().up_read.value = 999'999;
  }
}

// The header is read once: later changes of it in the ring do not matter.
TEST_F(ShmRecordTest, AHeaderThatChangesAfterItWasReadIsWhatItWas) {
  ShmRecord record{.type = ShmRecord::kMessage, .body_bytes = 4};
  Scribble(&record, sizeof record);
  EXPECT_FALSE(*reader_.Next(&record_));  // the body is not there yet
  record.body_bytes = 60000;
  std::memcpy(pair_.trainer->up_pipe().data(), &record, sizeof record);
  std::memcpy(pair_.trainer->up_pipe().data() + sizeof record, "body", 4);
  pair_.trainer->control().up_written.value = sizeof record + 4;
  ASSERT_TRUE(*reader_.Next(&record_));
  EXPECT_EQ(reader_.body(), "body");
}

TEST_F(ShmRecordTest, AClaimedLengthTakesNoMemoryBeforeItsBytesCome) {
  const ShmRecord record{.type = ShmRecord::kMessage, .body_bytes = 1 << 16};
  Scribble(&record, sizeof record);
  EXPECT_FALSE(*reader_.Next(&record_));
  EXPECT_LT(reader_.body().capacity(), 1024u);
}

}  // namespace
}  // namespace ballast
