#include "client/cpp/ctl/http_probe.h"

#include <memory>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

#include "client/cpp/transport/dial.h"

namespace ballast::ctl {
namespace {

absl::Status Lost(const std::string& address, const std::string& why) {
  return absl::UnavailableError(absl::StrCat(address, ": ", why));
}

}  // namespace

absl::StatusOr<HttpAnswer> HttpGet(const std::string& address, const std::string& path, double timeout_s,
                                   const std::string& authorities) {
  const auto dial = Dial::Tcp(address, timeout_s);
  if (!dial.ok()) return dial.status();
  if (!authorities.empty() && (*dial)->Shake(ClientSsl(authorities, SplitAddress(address)->host)) != SSL_ERROR_NONE) {
    const long verified = SSL_get_verify_result((*dial)->ssl());
    return Lost(address, verified == X509_V_OK ? "no TLS handshake" : X509_verify_cert_error_string(verified));
  }
  if (!(*dial)->Write(absl::StrCat("GET ", path, " HTTP/1.0\r\nHost: ", address, "\r\n\r\n"))) {
    return Lost(address, "it takes no request");
  }
  constexpr size_t kStatusLine = sizeof("HTTP/1.1 200") - 1, kMostBytes = 64 << 20, kPieceBytes = 16 << 10;
  std::string answer;
  while (answer.size() < kMostBytes) {
    const std::string piece = (*dial)->Read(kPieceBytes);
    if (piece.empty()) break;
    answer += piece;
  }
  int code = 0;
  if (answer.size() < kStatusLine || !answer.starts_with("HTTP/1.") || !absl::SimpleAtoi(answer.substr(9, 3), &code)) {
    return Lost(address, "no HTTP answer");
  }
  const size_t head = answer.find("\r\n\r\n");
  return HttpAnswer{.status = code, .body = head == std::string::npos ? "" : answer.substr(head + 4)};
}

}  // namespace ballast::ctl
