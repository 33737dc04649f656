// A thread, or word that the system has none left: by then other runs are in training, which are not to end for it.
#pragma once

#include <functional>
#include <new>
#include <string>
#include <thread>

namespace ballast {

// Whoever makes something of memory and threads turns both of their ends into RESOURCE_EXHAUSTED.
class NoThread : public std::bad_alloc {
 public:
  explicit NoThread(const std::string& reason);
  // The cause, and what to raise.
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  const std::string text_;
};

// Throws NoThread, which the log has, too.
std::thread StartThread(std::function<void()> run);

}  // namespace ballast
