#include "tests/bench/transports_peer.h"

#include <arpa/inet.h>
#include <grpcpp/grpcpp.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "proto/checksum.h"
#include "proto/shm/bell.h"
#include "proto/shm/record.h"
#include "proto/shm/slots.h"
#include "proto/shm/socket.h"
#include "proto/tls/certificate_files.h"

#include "ballast/v1/trainer.grpc.pb.h"

namespace ballast::bench {
namespace {

constexpr uint64_t kSlotBytes = 1 << 20;
constexpr uint64_t kCreditEvery = 8;  // gradients; the daemon says it as often as its strand comes to it
constexpr ShmShape kShape = {.pipe_bytes = 64 << 10,
                             .gradient_slots = 66,
                             .weight_slots = 8,
                             .gradient_slot_bytes = kSlotBytes,
                             .weight_slot_bytes = kSlotBytes};

[[noreturn]] void Die(const char* what) {
  std::fprintf(stderr, "error: %s\n", what);
  _exit(1);
}

void Check(const v1::Gradient& gradient, absl::Span<const std::byte> data) {
  if (Crc32c(data) != gradient.crc32c()) Die("a gradient arrived damaged");
}

absl::Span<const std::byte> BytesOf(const std::string& data) {
  return {reinterpret_cast<const std::byte*>(data.data()), data.size()};
}

// --- gRPC -----------------------------------------------------------------------------------------------------------

class GrpcPeer final : public v1::TrainerService::Service {
 public:
  grpc::Status Train(grpc::ServerContext*,
                     grpc::ServerReaderWriter<v1::TrainResponse, v1::TrainRequest>* stream) override {
    v1::TrainRequest request;
    std::thread sending;
    while (stream->Read(&request)) {
      if (request.has_gradient()) Check(request.gradient(), BytesOf(request.gradient().data()));
      if (request.has_step_begin()) {
        sending = std::thread([stream, begin = request.step_begin()] { SendWeights(stream, begin); });
      }
      if (!request.has_step_end()) continue;
      if (sending.joinable()) sending.join();
      v1::TrainResponse result;
      result.mutable_step_result();
      stream->Write(result);
    }
    if (sending.joinable()) sending.join();
    return grpc::Status::OK;
  }

 private:
  // One message whose bytes stay, as in the daemon's send slots.
  static void SendWeights(grpc::ServerReaderWriter<v1::TrainResponse, v1::TrainRequest>* stream,
                          const v1::StepBegin& begin) {
    v1::TrainResponse response;
    response.mutable_weights()->mutable_data()->assign(static_cast<size_t>(begin.loss_scale()), 'w');
    for (uint64_t i = 0; i < begin.step(); ++i) {
      response.mutable_weights()->set_crc32c(Crc32c(BytesOf(response.weights().data())));
      if (!stream->Write(response)) return;
    }
  }
};

std::shared_ptr<grpc::ServerCredentials> TlsOf(const std::string& folder) {
  const auto read = [&](const char* name) { return ReadSmallFile(folder + "/" + name).value(); };
  grpc::SslServerCredentialsOptions options(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = read("ca.crt");
  options.pem_key_cert_pairs = {{.private_key = read("daemon.key"), .cert_chain = read("daemon.crt")}};
  return grpc::SslServerCredentials(options);
}

[[noreturn]] void ServeGrpc(const std::string& address, const std::shared_ptr<grpc::ServerCredentials>& credentials,
                            int ready) {
  GrpcPeer service;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.SetMaxReceiveMessageSize(4 << 20);
  builder.AddListeningPort(address, credentials, &port);
  builder.RegisterService(&service);
  const auto server = builder.BuildAndStart();
  if (server == nullptr || write(ready, &port, sizeof port) != sizeof port) Die("the gRPC peer did not start");
  server->Wait();
  _exit(0);
}

// --- shared memory --------------------------------------------------------------------------------------------------

class ShmPeer {
 public:
  explicit ShmPeer(const ShmSegment& segment)
      : control_(segment.control()),
        reader_(UpPipe(segment), 1 << 20),
        borrower_(GradientSlots(segment)),
        lender_(WeightSlots(segment)),
        writer_(DownPipe(segment)),
        news_(&control_.daemon_bell) {}

  // Until the trainer hangs up.
  void Serve(const ShmSocket& socket) {
    for (ShmRecord record;;) {
      ++control_.daemon_beats.value;
      const bool more = reader_.Next(&record).value();
      if (control_.up_full.TakeDown()) Ring(&control_.trainer_bell);
      if (more) Take(record);
      // Weights go out as slots come free, between what comes in: one thread, like a stream's of the daemon.
      SendWeights();
      if (more) continue;
      if (!news_.Await(std::chrono::milliseconds(100), [this] { return HasWork(); }) && socket.HungUp()) return;
    }
  }

 private:
  bool HasWork() {
    return reader_.HasMore() || (left_ > 0 && lender_.returned() != returned_) || (ending_ && left_ == 0);
  }
  void Take(const ShmRecord& record) {
    v1::TrainRequest request;
    if (!request.ParseFromString(reader_.body())) Die("no TrainRequest");
    if (request.has_gradient()) {
      Check(request.gradient(), borrower_.Borrow(record.slot, record.payload_bytes).value());
      borrower_.GiveBack(record.slot);
      if (++uncredited_ == kCreditEvery) SayCredit();
    }
    if (request.has_step_begin()) {
      left_ = request.step_begin().step();
      bytes_ = static_cast<uint32_t>(request.step_begin().loss_scale());
    }
    ending_ = ending_ || request.has_step_end();
  }
  void SayCredit() {
    uncredited_ = 0;
    v1::TrainResponse response;
    response.mutable_credit()->set_bytes(1);
    Say(response);
  }
  void SendWeights() {
    while (left_ > 0) {
      returned_ = lender_.returned();
      auto slot = lender_.Take();
      if (!slot) {
        control_.weights_out.Raise();
        slot = lender_.Take();
      }
      if (!slot) return;
      v1::TrainResponse response;
      response.mutable_weights()->set_crc32c(Crc32c(lender_.at(*slot).subspan(0, bytes_)));
      lender_.Lend(*slot);
      Say(response, {.type = ShmRecord::kMessage, .slot = *slot, .payload_bytes = bytes_});
      --left_;
    }
    if (!ending_) return;
    ending_ = false;
    v1::TrainResponse result;
    result.mutable_step_result();
    Say(result);
  }
  void Say(const v1::TrainResponse& response, ShmRecord record = {.type = ShmRecord::kMessage}) {
    writer_.Add(record, response.SerializeAsString());
    if (!writer_.Flush().value()) Die("the trainer does not read");
    Ring(&control_.trainer_bell);
  }

  ShmControl& control_;
  ShmRecordReader reader_;
  ShmBorrower borrower_;
  ShmLender lender_;
  ShmRecordWriter writer_;
  ShmWaiter news_;
  uint64_t left_ = 0, returned_ = 0, uncredited_ = 0;
  uint32_t bytes_ = 0;
  bool ending_ = false;
};

[[noreturn]] void ServeShm(const std::string& path, int ready) {
  const ShmSocket listener = ShmSocket::Listen(path).value();
  const int port = 1;
  if (write(ready, &port, sizeof port) != sizeof port) Die("the peer of shared memory did not start");
  for (;;) {
    pollfd trainer{.fd = listener.fd(), .events = POLLIN, .revents = 0};
    poll(&trainer, 1, -1);
    const auto socket = listener.Accept();
    if (!socket.ok()) continue;
    while (!socket->ReceiveHello().ok()) std::this_thread::yield();
    const auto segment = ShmSegment::Create(kShape).value();
    for (uint32_t i = 0; i < kShape.weight_slots * kSlotBytes; ++i) segment->weight_slots()[i] = std::byte{'w'};
    if (!socket->Answer({.shape = kShape}, {segment->fd()}).ok()) Die("the grant did not go out");
    ShmPeer(*segment).Serve(*socket);
  }
}

// --- a bare socket --------------------------------------------------------------------------------------------------

void ServeRawConnection(int fd) {
  std::vector<char> buffer(kSlotBytes);
  uint64_t sizes[2];
  while (recv(fd, sizes, sizeof sizes, MSG_WAITALL) == sizeof sizes) {
    std::thread sending([&] {
      std::vector<char> out(kSlotBytes, 'w');
      for (uint64_t left = sizes[1]; left > 0;) {
        const ssize_t sent = send(fd, out.data(), std::min<uint64_t>(left, out.size()), MSG_NOSIGNAL);
        if (sent <= 0) return;
        left -= static_cast<uint64_t>(sent);
      }
    });
    for (uint64_t left = sizes[0]; left > 0;) {
      const ssize_t got = recv(fd, buffer.data(), std::min<uint64_t>(left, buffer.size()), 0);
      if (got <= 0) break;
      left -= static_cast<uint64_t>(got);
    }
    sending.join();
    if (send(fd, "k", 1, MSG_NOSIGNAL) != 1) return;
  }
}

[[noreturn]] void ServeRaw(int ready) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(listener, 1) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    Die("the bare socket did not open");
  }
  const int port = ntohs(address.sin_port);
  if (write(ready, &port, sizeof port) != sizeof port) Die("the bare peer did not start");
  for (;;) {
    const int fd = accept(listener, nullptr, nullptr);
    ServeRawConnection(fd);
    close(fd);
  }
}

[[noreturn]] void Serve(const std::string& kind, const std::string& folder, const std::string& path, int ready) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // as ballastd does
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 64 << 20);
  if (kind == "shm") ServeShm(path, ready);
  if (kind == "raw") ServeRaw(ready);
  ServeGrpc(kind == "unix" ? "unix:" + path : "127.0.0.1:0",
            kind == "tls" ? TlsOf(folder) : grpc::InsecureServerCredentials(), ready);
}

}  // namespace

Peer StartPeer(const std::string& kind, const std::string& folder) {
  int ready[2];
  if (pipe(ready) != 0) Die("pipe");
  const std::string path = folder + "/" + kind + ".sock";
  const pid_t pid = fork();
  if (pid == 0) Serve(kind, folder, path, ready[1]);
  close(ready[1]);
  int port = 0;
  if (pid < 0 || read(ready[0], &port, sizeof port) != sizeof port) Die("the peer did not start");
  close(ready[0]);
  Peer peer{.pid = pid};
  if (kind == "tcp" || kind == "tls") peer.server = "127.0.0.1:" + std::to_string(port);
  if (kind == "unix") peer.server = "unix:" + path;
  if (kind == "shm") peer.shm_socket = path;
  if (kind == "raw") peer.raw_port = port;
  return peer;
}

void StopPeer(const Peer& peer) {
  kill(peer.pid, SIGKILL);
  waitpid(peer.pid, nullptr, 0);
}

double CpuSeconds(const Peer& peer) {
  clockid_t clock{};
  timespec t{};
  if (clock_getcpuclockid(peer.pid, &clock) != 0 || clock_gettime(clock, &t) != 0) Die("the peer is gone");
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

}  // namespace ballast::bench
