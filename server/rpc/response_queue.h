// What goes out on one gRPC stream, which writes one message at a time. Copies of small messages to a client that takes
// batches are gathered while a write is under way and go together as the next one; who sends them need not wait.
// Memory: a batch that is written and one that is gathered, each at most kMostBatchBytes. Thread-compatible.
#pragma once

#include <cstddef>

#include "ballast/v1/trainer.pb.h"

namespace ballast {

class ResponseQueue {
 public:
  void set_takes_batches(bool takes) { takes_batches_ = takes; }
  // True: the message is copied, and the next may be added. False: it stays the sender's, who leaves it as it is and
  // adds nothing until Written says so.
  bool Add(const v1::TrainResponse* response);
  // What is to be written now, until Written; nullptr: nothing, or not yet.
  const v1::TrainResponse* Next();
  // The write is over; if it failed, what was gathered is dropped. True: Add was answered with false, and is free now.
  // Next comes after it.
  bool Written(bool ok);
  // Nothing waits to be written.
  bool empty() const { return waiting_ == nullptr && gathered_bytes_ == 0; }

 private:
  void DropGathered();

  bool takes_batches_ = false;
  bool writing_ = false;
  bool owed_ = false;                           // the sender's answer
  const v1::TrainResponse* waiting_ = nullptr;  // the sender's, too large for company
  v1::TrainResponse gathered_, batch_;
  size_t gathered_bytes_ = 0;
};

}  // namespace ballast
