#include "server/request_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"

namespace ballast {
namespace {

TEST(RequestQueueTest, RequestsBeyondTheirNumberAreRefusedUntilOneIsDone) {
  RequestQueue queue;
  absl::Notification go;
  absl::BlockingCounter done(RequestQueue::kMostRequests);
  for (size_t i = 0; i < RequestQueue::kMostRequests; ++i) {
    const absl::Status taken = queue.Post(1, [&](RequestQueue::Place place) {
      go.WaitForNotification();
      place.reset();
      done.DecrementCount();
    });
    ASSERT_TRUE(taken.ok()) << taken;
  }
  bool ran = false;
  const absl::Status refused = queue.Post(1, [&](RequestQueue::Place) { ran = true; });
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(refused.message().find("busy with 256 requests"), std::string::npos) << refused;
  go.Notify();
  done.Wait();
  absl::Notification again;
  EXPECT_TRUE(queue.Post(1, [&](RequestQueue::Place) { again.Notify(); }).ok());
  again.WaitForNotification();
  EXPECT_FALSE(ran);
}

TEST(RequestQueueTest, RequestsBeyondTheirBytesAreRefusedButNeverTheOnlyOne) {
  RequestQueue queue;
  absl::Notification started, go, large_done;
  ASSERT_TRUE(queue
                  .Post(3 * RequestQueue::kMostBytes,
                        [&](RequestQueue::Place place) {
                          started.Notify();
                          go.WaitForNotification();
                          place.reset();
                          large_done.Notify();
                        })
                  .ok());
  started.WaitForNotification();
  EXPECT_EQ(queue.Post(1, [](RequestQueue::Place) {}).code(), absl::StatusCode::kResourceExhausted);
  go.Notify();
  large_done.WaitForNotification();
  EXPECT_TRUE(queue.Post(RequestQueue::kMostBytes, [](RequestQueue::Place) {}).ok());
}

TEST(RequestQueueTest, APlaceIsKeptByWhatIsDoneElsewhere) {
  RequestQueue queue;
  std::vector<RequestQueue::Place> kept;
  absl::Notification taken;
  ASSERT_TRUE(queue
                  .Post(RequestQueue::kMostBytes,
                        [&](RequestQueue::Place place) {
                          kept.push_back(std::move(place));
                          taken.Notify();
                        })
                  .ok());
  taken.WaitForNotification();
  EXPECT_FALSE(queue.Post(1, [](RequestQueue::Place) {}).ok());
  kept.clear();
  EXPECT_TRUE(queue.Post(1, [](RequestQueue::Place) {}).ok());
}

}  // namespace
}  // namespace ballast
