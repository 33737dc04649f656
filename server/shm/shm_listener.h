// The Unix socket at which trainers of this host ask for shared memory: checks who asks, shapes and hands out the
// segment, and notices when a trainer's end is closed. One thread, asleep while nobody comes or goes.
//
// Thread-safe. A trainer that comes when file descriptors run short is turned away, and goes on over gRPC
// (server/base/descriptors.h). There are at most kMostGuests connections, and two for a session (the one that was lost
// and the next); each has kHelloS to say who it is.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/shm/socket.h"

#include "server/base/descriptors.h"
#include "server/rpc/rpc.h"
#include "server/shm/shm_stream.h"

namespace ballast {

class ShmListener {
 public:
  static constexpr size_t kMostGuests = 2048;
  static constexpr double kHelloS = 2;

  // `where`: a path, or a folder with a slash at its end, in which the socket is named after `name` and those that
  // daemons left behind are removed. The folder is made, for this user alone; one that others may write to is refused.
  static absl::StatusOr<std::unique_ptr<ShmListener>> Start(const RpcEnvironment& environment, const std::string& where,
                                                            const std::string& name);
  ~ShmListener();  // ends all streams; the socket is removed
  const std::string& path() const { return path_; }

 private:
  struct Guest {
    ShmSocket socket;                   // until it has a stream
    std::shared_ptr<ShmStream> stream;  // from the hello on
    double since_s = 0;
    int fd() const { return stream != nullptr ? stream->fd() : socket.fd(); }
  };

  ShmListener(const RpcEnvironment& environment, std::string path, ShmSocket socket);
  void Loop();
  // Waits until guests have something to say, or hung up, and tells which. False: it is time to stop.
  bool Wait(std::vector<bool>* stirred);
  void Admit();
  // False: nobody waits, or nobody can be admitted now.
  bool AdmitOne();
  // False: the guest is to be dismissed.
  bool Answer(Guest* guest);
  // Gives it a stream.
  absl::Status Begin(Guest* guest, const ShmSocket::Hello& hello);
  absl::StatusOr<ShmStream::Connection> Grant(const Guest& guest, const ShmSocket::Hello& hello) const;

  const RpcEnvironment environment_;
  const std::string path_;
  const ShmSocket socket_;
  int stop_fd_ = -1;   // an eventfd
  bool rest_ = false;  // there is not even the spare descriptor
  SpareDescriptor spare_;
  std::vector<Guest> guests_;
  std::thread thread_;
};

}  // namespace ballast
