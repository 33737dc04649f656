// What of a stream's messages goes out together, and when their sender may go on.
#include "server/rpc/response_queue.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "proto/batch.h"

namespace ballast {
namespace {

v1::TrainResponse WeightsOf(uint32_t tensor, size_t bytes = 8) {
  v1::TrainResponse response;
  response.mutable_weights()->set_tensor(tensor);
  response.mutable_weights()->set_data(std::string(bytes, 'w'));
  return response;
}

// The tensors in it, in order.
std::vector<uint32_t> Tensors(const v1::TrainResponse* written) {
  if (written == nullptr) return {};
  if (!written->has_batch()) return {written->weights().tensor()};
  std::vector<uint32_t> tensors;
  for (const v1::TrainResponse& response : written->batch().responses()) tensors.push_back(response.weights().tensor());
  return tensors;
}

using Of = std::vector<uint32_t>;

class ResponseQueueTest : public ::testing::Test {
 protected:
  ResponseQueueTest() { queue_.set_takes_batches(true); }
  bool Add(uint32_t tensor, size_t bytes = 8) {
    sent_ = WeightsOf(tensor, bytes);
    return queue_.Add(&sent_);
  }

  ResponseQueue queue_;
  v1::TrainResponse sent_;
};

TEST_F(ResponseQueueTest, MessagesAddedDuringAWriteGoTogether) {
  EXPECT_TRUE(Add(0));
  EXPECT_EQ(Tensors(queue_.Next()), Of({0}));
  for (uint32_t tensor : {1, 2, 3}) EXPECT_TRUE(Add(tensor));
  EXPECT_EQ(queue_.Next(), nullptr);
  EXPECT_FALSE(queue_.empty());
  EXPECT_FALSE(queue_.Written(true));
  EXPECT_EQ(Tensors(queue_.Next()), Of({1, 2, 3}));
  EXPECT_TRUE(queue_.empty());
  EXPECT_FALSE(queue_.Written(true));
  EXPECT_EQ(queue_.Next(), nullptr);
}

TEST_F(ResponseQueueTest, ALargeOneGoesAloneAfterThoseBeforeIt) {
  EXPECT_TRUE(Add(0));
  EXPECT_EQ(Tensors(queue_.Next()), Of({0}));
  EXPECT_TRUE(Add(1));
  EXPECT_FALSE(Add(2, kMostBatchedBytes));
  EXPECT_FALSE(queue_.Written(true));
  EXPECT_EQ(Tensors(queue_.Next()), Of({1}));
  EXPECT_FALSE(queue_.Written(true));
  const v1::TrainResponse* large = queue_.Next();
  EXPECT_EQ(large, &sent_) << "no copy";
  EXPECT_TRUE(queue_.Written(true));
}

TEST_F(ResponseQueueTest, TheSenderWaitsWhenTheBatchIsFull) {
  EXPECT_TRUE(Add(0));
  ASSERT_NE(queue_.Next(), nullptr);
  uint32_t tensor = 1;
  while (Add(tensor, 8 << 10)) ASSERT_LT(++tensor, kMostBatchBytes / (8 << 10));
  EXPECT_TRUE(queue_.Written(true));
  const v1::TrainResponse* batch = queue_.Next();
  ASSERT_NE(batch, nullptr);
  EXPECT_LE(batch->ByteSizeLong(), kMostBatchBytes + 1024);
  EXPECT_EQ(Tensors(batch).back(), tensor);
}

TEST_F(ResponseQueueTest, ABatchHasAtMostKMostBatchMessages) {
  EXPECT_TRUE(Add(0));
  ASSERT_NE(queue_.Next(), nullptr);
  int gathered = 1;
  while (Add(1, 0)) ASSERT_LT(++gathered, kMostBatchMessages + 1);
  EXPECT_EQ(gathered, kMostBatchMessages);
}

TEST_F(ResponseQueueTest, AClientThatTakesNoBatchesGetsNone) {
  queue_.set_takes_batches(false);
  EXPECT_FALSE(Add(0));
  EXPECT_EQ(queue_.Next(), &sent_);
  EXPECT_TRUE(queue_.Written(true));
  EXPECT_TRUE(queue_.empty());
}

TEST_F(ResponseQueueTest, AFailedWriteDropsWhatWaits) {
  EXPECT_TRUE(Add(0));
  ASSERT_NE(queue_.Next(), nullptr);
  EXPECT_TRUE(Add(1));
  EXPECT_FALSE(Add(2, kMostBatchedBytes));
  EXPECT_TRUE(queue_.Written(false));
  EXPECT_TRUE(queue_.empty());
  EXPECT_EQ(queue_.Next(), nullptr);
}

}  // namespace
}  // namespace ballast
