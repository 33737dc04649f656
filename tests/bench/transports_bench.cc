// How fast the transports are, end to end between two processes and without a run behind them. transports.py asks it in
// turns.
//
//   transports_bench FOLDER     FOLDER: for its Unix sockets
//   > TRANSPORT MODE BYTES COUNT
//   < SECONDS CLIENT_CPU_SECONDS PEER_CPU_SECONDS
//
// TRANSPORT: tcp, tls, unix (gRPC), shm (copied into a slot), inplace (the gradient is there already), raw (TCP socket),
// memcpy, aes (what TLS computes at both ends, in one thread, and nothing else). MODE: push, pull, both, ping. A transfer is BYTES in chunks of 1 MiB and is over when its end is
// acknowledged; COUNT of them are timed. Both ends compute and check the chunks' checksums, but for raw, memcpy
// and aes.
#include <arpa/inet.h>
#include <malloc.h>
#include <openssl/evp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "proto/checksum.h"

#include "client/cpp/ctl/authority.h"
#include "client/cpp/transport/connection.h"
#include "client/cpp/transport/grpc_transport.h"
#include "client/cpp/transport/shm_transport.h"
#include "tests/bench/transports_peer.h"

namespace ballast::bench {
namespace {

constexpr uint64_t kChunk = 1 << 20;
constexpr uint64_t kArena = 64 << 20;  // what is sent and where it lands, beyond the caches

[[noreturn]] void Die(const std::string& what) {
  std::printf("error: %s\n", what.c_str());
  std::fflush(stdout);
  _exit(1);
}

// The peer's answers may take seconds where others use the machine.
constexpr double kPatienceS = 60;
template <class T>
T Opened(absl::StatusOr<T> got) {
  if (!got.ok()) Die(got.status().ToString());
  return *std::move(got);
}

struct Transfer {
  uint64_t push = 0, pull = 0;  // bytes
};

// One way to move bytes, open for the program's life.
class Mover {
 public:
  virtual ~Mover() = default;
  virtual void Move(const Transfer& transfer) = 0;
};

class TransportMover final : public Mover {
 public:
  explicit TransportMover(std::unique_ptr<Transport> transport)
      : transport_(std::move(transport)), from_(kArena, 'g'), to_(kArena) {
    v1::TrainRequest open;
    open.mutable_open();
    transport_->Start(open);
  }
  ~TransportMover() override {
    transport_->Cancel();
    v1::TrainResponse response;
    for (absl::Span<const std::byte> data; transport_->Read(&response, &data);) continue;
    transport_->Finish().IgnoreError();  // cancelled, as told
  }

  void Move(const Transfer& transfer) override {
    if (transfer.push == 0) return WriteAndRead(transfer);
    std::thread writing([&] { Push(transfer); });
    ReadOn();
    writing.join();
  }

 private:
  void WriteAndRead(const Transfer& transfer) {
    Push(transfer);
    ReadOn();
  }
  void Push(const Transfer& transfer) {
    v1::TrainRequest request;
    if (transfer.pull > 0) {
      request.mutable_step_begin()->set_step((transfer.pull + kChunk - 1) / kChunk);
      request.mutable_step_begin()->set_loss_scale(static_cast<double>(std::min(transfer.pull, kChunk)));
      Write(&request);
    }
    for (uint64_t done = 0; done < transfer.push; done += kChunk) {
      const uint64_t bytes = std::min(kChunk, transfer.push - done);
      v1::Gradient& gradient = *request.mutable_gradient();
      gradient.mutable_data()->resize(bytes);
      // The chunk as the host buffer holds it: another one each time.
      std::swap(*gradient.mutable_data(), Chunk(done, bytes));
      gradient.clear_crc32c();
      AwaitSlot();
      Write(&request);
      std::swap(*gradient.mutable_data(), Chunk(done, bytes));
    }
    request.mutable_step_end();
    Write(&request);
  }
  std::string& Chunk(uint64_t at, uint64_t bytes) {
    std::string& chunk = chunks_[at % kArena / kChunk];
    if (chunk.size() != bytes) chunk.assign(bytes, 'g');
    return chunk;
  }
  static absl::Span<const std::byte> Bytes(const std::string& s) {
    return {reinterpret_cast<const std::byte*>(s.data()), s.size()};
  }
  void Write(v1::TrainRequest* request) {
    const auto room = transport_->Reserve(request->gradient().data().size(), /*keep=*/false);
    const absl::StatusOr<bool> alive =
        room ? WriteThroughRoom(transport_.get(), *room, request) : transport_->Write(request, /*more=*/false);
    if (!alive.ok() || !*alive) Die("the stream ended");
  }
  void AwaitSlot() {
    if (transport_->slots_free() > 1) return;
    absl::MutexLock lock(&mu_);
    const auto room = [this] { return transport_->slots_free() > 1; };
    mu_.Await(absl::Condition(&room));
  }
  void ReadOn() {
    v1::TrainResponse response;
    uint64_t done = 0;
    for (absl::Span<const std::byte> data; transport_->Read(&response, &data);) {
      if (response.has_step_result()) return;
      if (response.has_credit()) absl::MutexLock wake(&mu_);
      if (!response.has_weights()) continue;
      if (Crc32c(data) != response.weights().crc32c()) Die("weights arrived damaged");
      std::memcpy(to_.data() + done % kArena, data.data(), data.size());
      done += kChunk;
    }
    Die("the stream ended");
  }

  const std::unique_ptr<Transport> transport_;
  absl::Mutex mu_;  // of who waits for a slot
  std::string from_;
  std::vector<std::byte> to_;
  std::map<uint64_t, std::string> chunks_;
};

// Records of gradients that lie in their slots already.
class InPlaceMover final : public Mover {
 public:
  explicit InPlaceMover(const std::string& path)
      : socket_(Opened(ShmSocket::Connect(path))),
        segment_(Opened(socket_.Ask({}, kPatienceS))),
        lender_(GradientSlots(*segment_)),
        writer_(UpPipe(*segment_)),
        reader_(DownPipe(*segment_), 1 << 20),
        news_(&segment_->control().trainer_bell) {
    std::memset(segment_->gradient_slots(), 'g', segment_->shape().gradient_slots * kChunk);
  }

  void Move(const Transfer& transfer) override {
    v1::TrainRequest request;
    for (uint64_t done = 0; done < transfer.push; done += kChunk) {
      const auto bytes = static_cast<uint32_t>(std::min(kChunk, transfer.push - done));
      // The slot that was away longest, as backward would fill them: not what is still in the caches.
      while (lender_.free() <= 1) ReadOne();
      const uint32_t slot = lender_.Take().value();
      request.mutable_gradient()->set_crc32c(Crc32c(lender_.at(slot).subspan(0, bytes)));
      lender_.Lend(slot);
      Write({.type = ShmRecord::kMessage, .slot = slot, .payload_bytes = bytes}, request);
    }
    request.mutable_step_end();
    Write({.type = ShmRecord::kMessage}, request);
    while (!ReadOne()) continue;
  }

 private:
  void Write(const ShmRecord& record, const v1::TrainRequest& request) {
    writer_.Add(record, request.SerializeAsString());
    while (!writer_.Flush().value()) ReadOne();
    Ring(&segment_->control().daemon_bell);
  }
  // Whether it was the result.
  bool ReadOne() {
    ShmRecord record;
    while (!reader_.Next(&record).value()) {
      news_.Await(std::chrono::milliseconds(100), [this] { return reader_.HasMore(); });
    }
    v1::TrainResponse response;
    return response.ParseFromString(reader_.body()) && response.has_step_result();
  }

  const ShmSocket socket_;
  const std::shared_ptr<ShmSegment> segment_;
  ShmLender lender_;
  ShmRecordWriter writer_;
  ShmRecordReader reader_;
  ShmWaiter news_;
};

class RawMover final : public Mover {
 public:
  explicit RawMover(int port)
      : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), from_(kArena, 'g'), to_(kArena, 't') {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    if (connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) Die("no bare socket");
  }
  ~RawMover() override { close(fd_); }

  void Move(const Transfer& transfer) override {
    const uint64_t sizes[2] = {transfer.push, transfer.pull};
    if (send(fd_, sizes, sizeof sizes, 0) != sizeof sizes) Die("send");
    std::thread writing([&] {
      for (uint64_t done = 0; done < transfer.push;) {
        const uint64_t bytes = std::min({kChunk, transfer.push - done, kArena - done % kArena});
        const ssize_t sent = send(fd_, from_.data() + done % kArena, bytes, MSG_NOSIGNAL);
        if (sent <= 0) Die("send");
        done += static_cast<uint64_t>(sent);
      }
    });
    for (uint64_t done = 0; done < transfer.pull + 1;) {  // the acknowledgement follows
      const uint64_t bytes = std::min({kChunk, transfer.pull + 1 - done, kArena - done % kArena});
      const ssize_t got = recv(fd_, to_.data() + done % kArena, bytes, 0);
      if (got <= 0) Die("recv");
      done += static_cast<uint64_t>(got);
    }
    writing.join();
  }

 private:
  const int fd_;
  std::string from_, to_;
};

class MemcpyMover final : public Mover {
 public:
  MemcpyMover() : from_(kArena, 'g'), to_(kArena, 't') {}
  void Move(const Transfer& transfer) override {
    for (uint64_t done = 0; done < transfer.push + transfer.pull; done += kChunk) {
      std::memcpy(to_.data() + done % kArena, from_.data() + done % kArena,
                  std::min(kChunk, transfer.push + transfer.pull - done));
    }
  }

 private:
  std::string from_, to_;
};

// AES-256-GCM, which both ends agree on, over records as long as TLS allows: one end seals each, the other one opens it.
class AesMover final : public Mover {
 public:
  AesMover() : plain_(kChunk, 'g'), sealed_(kChunk), opened_(kChunk) {
    for (auto [end, seals] : {std::pair(&sealer_, 1), std::pair(&opener_, 0)}) {
      end->reset(EVP_CIPHER_CTX_new());
      const auto* key = reinterpret_cast<const unsigned char*>("a key of 32 bytes, made up for it");
      if (EVP_CipherInit_ex(end->get(), EVP_aes_256_gcm(), nullptr, key, nonce_, seals) != 1) Die("AES-256-GCM");
    }
  }
  void Move(const Transfer& transfer) override {
    for (uint64_t done = 0; done < transfer.push + transfer.pull; done += kRecord) {
      const uint64_t at = done % kChunk;
      std::memcpy(nonce_, &done, sizeof done);
      unsigned char tag[16];
      Run(sealer_.get(), &plain_[at], &sealed_[at]);
      EVP_CIPHER_CTX_ctrl(sealer_.get(), EVP_CTRL_AEAD_GET_TAG, sizeof tag, tag);
      EVP_CIPHER_CTX_ctrl(opener_.get(), EVP_CTRL_AEAD_SET_TAG, sizeof tag, tag);
      Run(opener_.get(), &sealed_[at], &opened_[at]);
    }
  }

 private:
  static constexpr int kRecord = 16 << 10;
  struct Free {
    void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
  };
  using Context = std::unique_ptr<EVP_CIPHER_CTX, Free>;

  void Run(EVP_CIPHER_CTX* end, const unsigned char* from, unsigned char* to) {
    int written = 0, rest = 0;
    if (EVP_CipherInit_ex(end, nullptr, nullptr, nullptr, nonce_, -1) != 1 ||
        EVP_CipherUpdate(end, to, &written, from, kRecord) != 1 || EVP_CipherFinal_ex(end, to + written, &rest) != 1) {
      Die("AES-256-GCM");
    }
  }

  unsigned char nonce_[12] = {};
  Context sealer_, opener_;
  std::vector<unsigned char> plain_, sealed_, opened_;
};

// In the folder, for a day; returns the client's.
ClientTls MakeCertificates(const std::string& folder) {
  const ctl::Validity day{.not_before = absl::Now() - absl::Hours(1), .not_after = absl::Now() + absl::Hours(24)};
  const ctl::Authority authority = Opened(ctl::Authority::Make("transports_bench", day));
  const auto write = [&](const std::string& name, const std::string& text) {
    std::ofstream(folder + "/" + name) << text;
    if (chmod((folder + "/" + name).c_str(), 0600) != 0) Die("chmod");
  };
  const auto write_pair = [&](const std::string& name, TlsEnd end) {
    const ctl::PemPair pair =
        Opened(authority.Issue({.common_name = name, .end = end, .names = {"127.0.0.1"}, .validity = day}));
    write(name + ".crt", pair.certificate);
    write(name + ".key", pair.key);
  };
  write("ca.crt", authority.pem().certificate);
  write_pair("daemon", TlsEnd::kDaemon);
  write_pair("trainer", TlsEnd::kClient);
  return {.ca = folder + "/ca.crt", .certificate = folder + "/trainer.crt", .key = folder + "/trainer.key"};
}

double OwnCpuSeconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

int Main(const std::string& folder) {
  // What ballastd does for itself, and a trainer may by its environment.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 64 << 20);
  const ClientTls tls = MakeCertificates(folder);
  std::map<std::string, Peer> peers;
  for (const char* kind : {"tcp", "tls", "unix", "shm", "raw"}) peers[kind] = StartPeer(kind, folder);
  std::map<std::string, std::unique_ptr<Connection>> connections;
  const auto grpc_transport = [&](const std::string& kind) {
    connections[kind] = Opened(Connection::Open(
        {.server = peers[kind].server, .tls = kind == "tls" ? tls : ClientTls(), .connect_timeout_s = kPatienceS}));
    return std::make_unique<TransportMover>(std::make_unique<GrpcTransport>(*connections[kind]));
  };
  // The peer of shared memory has one trainer at a time.
  const std::map<std::string, std::function<std::unique_ptr<Mover>()>> open = {
      {"tcp", [&] { return grpc_transport("tcp"); }},
      {"tls", [&] { return grpc_transport("tls"); }},
      {"unix", [&] { return grpc_transport("unix"); }},
      {"shm",
       [&] {
         return std::make_unique<TransportMover>(
             Opened(ShmTransport::Open(peers["shm"].shm_socket, std::string(16, 't'), kPatienceS)));
       }},
      {"inplace", [&] { return std::make_unique<InPlaceMover>(peers["shm"].shm_socket); }},
      {"raw", [&] { return std::make_unique<RawMover>(peers["raw"].raw_port); }},
      {"memcpy", [] { return std::make_unique<MemcpyMover>(); }},
      {"aes", [] { return std::make_unique<AesMover>(); }},
  };
  std::string transport, mode;
  uint64_t bytes = 0, count = 0;
  while (std::cin >> transport >> mode >> bytes >> count) {
    const std::unique_ptr<Mover> mover = open.at(transport)();
    const Transfer transfer{.push = mode == "push" || mode == "both" ? bytes : 0,
                            .pull = mode == "pull" || mode == "both" ? bytes : 0};
    mover->Move(transfer);  // threads and pages there, caches warm
    const auto peer = peers.find(transport == "inplace" ? "shm" : transport);
    const auto peer_cpu = [&] { return peer == peers.end() ? 0 : CpuSeconds(peer->second); };
    const double own_s = OwnCpuSeconds(), peer_s = peer_cpu();
    const auto began = std::chrono::steady_clock::now();
    for (uint64_t i = 0; i < count; ++i) mover->Move(transfer);
    const double took_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    std::printf("%.9f %.6f %.6f\n", took_s, OwnCpuSeconds() - own_s, peer_cpu() - peer_s);
    std::fflush(stdout);
  }
  for (const auto& [kind, peer] : peers) StopPeer(peer);
  return 0;
}

}  // namespace
}  // namespace ballast::bench

int main(int argc, char** argv) {
  if (argc != 2) return 1;
  return ballast::bench::Main(argv[1]);
}
