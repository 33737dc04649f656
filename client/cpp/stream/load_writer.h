// Writes the messages of one LoadState call; small ones go together if the daemon takes batches
// (LoadStateRequest.batch). One thread.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "ballast/v1/trainer.grpc.pb.h"

namespace ballast {

class LoadWriter {
 public:
  struct Options {
    bool takes_batches = false;  // AttachResponse.takes_load_batches
    bool replace = false;        // LoadStateRequest.replace
  };
  // `writer` outlives it.
  LoadWriter(grpc::ClientWriter<v1::LoadStateRequest>* writer, const std::string& token, const Options& options);

  // Writes a message, which has no token yet. False when the stream is broken; its Finish says why.
  bool Write(v1::LoadStateRequest request);
  // Writes the messages that wait for others. False as in Write.
  bool Flush();
  // Messages given to the stream so far, those of batches one by one.
  uint64_t sent() const { return sent_; }

 private:
  bool Send(v1::LoadStateRequest* request, uint64_t messages);

  grpc::ClientWriter<v1::LoadStateRequest>* const writer_;
  const Options options_;
  std::string token_;  // until the first message has it
  v1::LoadStateRequest batch_;
  size_t batch_bytes_ = 0;
  uint64_t sent_ = 0;
};

}  // namespace ballast
