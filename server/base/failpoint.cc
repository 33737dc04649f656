#include "server/base/failpoint.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "absl/strings/numbers.h"

namespace ballast {
namespace {

struct Armed {
  std::string name;
  int visit = 1;  // that ends the process
};
Armed armed;
std::atomic<int> visits = 0;

}  // namespace

void Failpoint(const char* name) {
  if (armed.name == name && ++visits == armed.visit) kill(getpid(), SIGKILL);
}

void ArmFailpoint(const std::string& place) {
  const size_t equals = place.find('=');
  armed.name = place.substr(0, equals);
  if (equals != std::string::npos && !absl::SimpleAtoi(place.substr(equals + 1), &armed.visit)) armed.name.clear();
}

}  // namespace ballast
