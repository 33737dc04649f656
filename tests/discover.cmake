# ballast_discover_tests(NAME [what gtest_discover_tests takes]...) makes the tests of a GoogleTest program known to ctest:
# one by one, but under sanitizers all as one, since a sanitized program takes longer to start than most tests.
include(GoogleTest)

function(ballast_discover_tests name)
  if(BALLAST_SANITIZER)
    add_test(NAME ${name} COMMAND ${name})
  else()
    gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 ${ARGN})
  endif()
endfunction()
