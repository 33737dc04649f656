// The messages that go out on one gRPC stream, which writes one at a time. If the client takes batches, small messages
// are copied and gathered until Next, and go together, so their sender need not wait unless a write is under way and
// another batch is full.
// Memory: a batch being written and a batch being gathered, each at most kMostBatchBytes. Thread-compatible.
#pragma once

#include <cstddef>

#include "ballast/v1/trainer.pb.h"

namespace ballast {

class ResponseQueue {
 public:
  void set_takes_batches(bool takes) { takes_batches_ = takes; }
  void set_takes_small_weights(bool takes) { takes_small_weights_ = takes; }
  // True: the message is copied, and the next may be added. False: the message stays the sender's, who must leave it as
  // it is, and add nothing, until Written says so.
  bool Add(const v1::TrainResponse* response);
  // The message to write now, valid until Written; nullptr: nothing, or not yet.
  const v1::TrainResponse* Next();
  // The write is over; if it failed, the gathered messages are dropped. True: Add had returned false, and its message
  // is the sender's again. To be followed by Next.
  bool Written(bool ok);
  // More might not fit: Next must come before another Add.
  bool full() const;
  // Nothing waits to be written.
  bool empty() const { return waiting_ == nullptr && gathered_bytes_ == 0; }

 private:
  // Among the small weights that were gathered last, or as the first of others. False: it is not small weights.
  bool Join(const v1::TrainResponse& response);
  void DropGathered();

  bool takes_batches_ = false;
  bool takes_small_weights_ = false;
  bool writing_ = false;
  bool owed_ = false;                           // the sender's answer
  const v1::TrainResponse* waiting_ = nullptr;  // the sender's, too large for company
  v1::TrainResponse gathered_, batch_;
  size_t gathered_bytes_ = 0;
};

}  // namespace ballast
