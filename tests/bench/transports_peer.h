// The other end for transports_bench: a process that takes gradients and gives weights as the daemon's edge does,
// checksums included, without a run behind it.
//
// StepBegin{step, loss_scale} asks for `step` chunks of weights of `loss_scale` bytes each. Gradients are checked and
// dropped. StepEnd is answered by StepResult when all weights that were asked for are sent.
#pragma once

#include <sys/types.h>

#include <string>

namespace ballast::bench {

struct Peer {
  std::string server;      // for Connection; empty: none
  std::string shm_socket;  // for ShmTransport; empty: none
  int raw_port = 0;        // a TCP socket: 8 bytes of size to push, 8 of size to pull, then those bytes
  pid_t pid = 0;
};

// Starts the peer by a fork; to be called before any thread exists. `kind`: tcp | tls | unix | shm | raw. tls: both ends
// show a certificate; ca.crt, daemon.crt and daemon.key are in the folder.
Peer StartPeer(const std::string& kind, const std::string& folder);
void StopPeer(const Peer& peer);
// The processor time that the peer has taken so far.
double CpuSeconds(const Peer& peer);

}  // namespace ballast::bench
