"""Does Lion keep every weight within 1/λ?"""
