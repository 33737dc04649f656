// Where the two ends of the fake NCCL's communicator meet, fake_nccl.h: a socket that the process listens on which made the
// id, until both have come.
#pragma once

#include <string>
#include <thread>

namespace ballast {

class FakeNcclRoot {
 public:
  FakeNcclRoot();
  // Ends with who waits there.
  ~FakeNcclRoot();
  FakeNcclRoot(const FakeNcclRoot&) = delete;
  FakeNcclRoot& operator=(const FakeNcclRoot&) = delete;

  // In the id.
  const std::string& name() const { return name_; }

  // A socket to that root, that Await takes; -1: there is no such root.
  static int Connect(const std::string& name, int rank);
  // Waits for the other end: a socket to it; -1: the root or `root` was shut down.
  static int Await(int root);

 private:
  void Run() const;

  const std::string name_;
  const int listening_;
  std::thread thread_;
};

}  // namespace ballast
