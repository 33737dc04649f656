// A client that logs nothing.
#pragma once

#include <memory>
#include <string>

#include "client/cpp/client.h"

namespace ballast {

inline std::unique_ptr<Client> QuietClient(const std::string& server) {
  return Client::Connect({.server = server, .log = [](const std::string&) {}}).value();
}

}  // namespace ballast
