// ballast::Subscriber for Python. Used with the interpreter's lock, which is free while it waits or moves bytes.
#pragma once

#include <nanobind/nanobind.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "client/cpp/follow/subscriber.h"
#include "client/python/core/landing.h"

namespace ballast {

class PySubscriber {
 public:
  static PySubscriber Open(ClientOptions options, const SubscribeOptions& subscription);
  PySubscriber(PySubscriber&&) = default;
  ~PySubscriber();

  // None: no version is here within timeout_s. Ctrl-C ends the wait.
  nanobind::object Next(double timeout_s) const;
  bool Await(double timeout_s) const;
  bool readable() const { return Get()->readable(); }
  nanobind::list Tensors() const;
  void Read(const Places& places) const;
  uint64_t CountChanged(uint32_t tensor) const;
  // As Subscriber::ReadChanged, to these addresses.
  void ReadChanged(uint32_t tensor, uint64_t count, uintptr_t places, uintptr_t values, uint64_t bytes) const;
  void Rollback(const std::string& tag) const;
  void Resume() const { Get()->Resume(); }
  // Calls under way in other threads end at once.
  void Close();

 private:
  explicit PySubscriber(std::unique_ptr<Subscriber> subscriber);
  std::shared_ptr<Subscriber> Get() const;

  std::shared_ptr<Subscriber> subscriber_;
  pid_t process_;
};

void BindSubscriber(nanobind::module_& module);

}  // namespace ballast
